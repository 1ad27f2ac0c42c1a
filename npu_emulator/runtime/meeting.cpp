// How the ranks of a communicator find each other, in each of HCCL's forms, and how they part.
//
// They share a file without a name (memfd) of rank 0's process, so that nothing remains after a crash. Where it is found stands in
// the root info, in the memory of a parent communicator, or behind a socket whose name follows from the rank table.
#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <fstream>
#include <optional>
#include <sstream>

#include "communicator.h"

namespace emu {

// Makes the file of a new communicator and writes where it is found. Rank 0 closes it when all ranks have joined.
bool open_root(char* place, size_t capacity) {
    const int file = memfd_create("npu_emulator", MFD_CLOEXEC);
    if (file < 0) return false;
    snprintf(place, capacity, "/proc/%d/fd/%d", getpid(), file);
    return true;
}

namespace {

// One rank's part of a new communicator, which the others may not have joined yet; null after an error.
std::unique_ptr<Communicator> attach(const char* place, uint32_t ranks, uint32_t rank, int32_t device, std::string name, HcclResult& result) {
    result = HCCL_E_PARA;
    if (ranks == 0 || rank >= ranks) {
        fail(ACL_ERROR_RT_PARAM_INVALID, "a communicator of " + std::to_string(ranks) + " ranks has no rank " + std::to_string(rank), "number ranks from 0");
        return nullptr;
    }
    if (ranks > kRanks) {
        fail(ACL_ERROR_RT_PARAM_INVALID, "a communicator of " + std::to_string(ranks) + " ranks is too large: the emulated HCCL runs on one machine, and serves up to " + std::to_string(kRanks) + " ranks", "use a smaller group on the emulated device");
        return nullptr;
    }
    const int file = open(place, O_RDWR | O_CLOEXEC);
    if (file < 0) {
        fail(ACL_ERROR_RT_PARAM_INVALID, std::string("the emulated HCCL cannot reach rank 0 at ") + place + " (" + strerror(errno) + ")",
             "run all ranks on one machine, as one user, while rank 0 lives; a group that is made anew needs a fresh store, because the first one holds the root info of the old group");
        result = HCCL_E_TCP_CONNECT;
        return nullptr;
    }
    const uint64_t size = whole(ranks);
    void* memory = ftruncate(file, static_cast<off_t>(size)) != 0 ? MAP_FAILED : mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (memory == MAP_FAILED) {
        fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the emulated HCCL has no memory for a communicator (" + std::string(strerror(errno)) + ")", "free memory of the device first");
        result = HCCL_E_SYSCALL;
        return nullptr;
    }
    auto c = std::make_unique<Communicator>();
    c->name = std::move(name);
    c->ranks = ranks;
    c->rank = rank;
    c->device = device;
    c->memory = static_cast<char*>(memory);
    c->size = size;
    {
        Lock lock(state().mutex);
        c->seat(rank).board = board_file();
        launches_here();
    }
    c->seat(rank).device = device;
    c->seat(rank).born.store(birth_of(getpid()));
    c->seat(rank).process.store(getpid());
    auto& shared = *reinterpret_cast<Shared*>(memory);
    if (rank == 0) shared.id = new_id();
    shared.joined.fetch_add(1);
    wake_all(shared.joined);
    return c;
}

// What is wrong with the ranks that have joined; empty if nothing is.
std::string loss_of_joined(Communicator& c) {
    for (uint32_t other = 0; other < c.ranks; ++other) {
        if (c.seat(other).process.load() == 0) continue;
        const std::string lost = loss(c, other);
        if (!lost.empty()) return "rank " + std::to_string(other) + " " + lost;
    }
    return "";
}

HcclResult fail_meeting(const Meeting& meeting, const std::string& what, const std::string& lost) {
    if (meeting.found_deadlock()) fail(ACL_ERROR_RT_FFTS_PLUS_TIMEOUT, what + " was not made: " + lost, "use groups for the first time in an order that fits on all ranks");
    else fail(ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, what + " was not made: " + lost, "start every rank of the group, and let each one use it");
    return HCCL_E_TIMEOUT;
}

// Waits until all ranks have joined, and starts the engine.
HcclResult meet_all(std::unique_ptr<Communicator> c, Communicator** made, bool by_table = false, const FindRanks& find = nullptr) {
    auto& shared = *reinterpret_cast<Shared*>(c->memory);
    std::atomic<uint32_t>& joined = shared.joined;
    const double patience = seconds_from("HCCL_CONNECT_TIMEOUT", 120), start = now_milliseconds();
    std::optional<Meeting> meeting;
    std::vector<Attendee> known(c->ranks);
    while (joined.load() < c->ranks) {
        nap(joined, joined.load(), kNap);
        if (joined.load() >= c->ranks) break;
        const std::string purpose = find ? find(known) : "";
        if (!meeting) meeting.emplace("rank " + std::to_string(c->rank) + " of " + c->name + purpose);
        std::map<uint32_t, Attendee> missing;
        Company company{c->ranks, by_table};
        for (uint32_t other = 0; other < c->ranks; ++other)
            if (const int32_t process = c->seat(other).process.load(); process == 0) missing[other] = known[other];
            else company.joined.insert(process);
        if (missing.empty()) continue;  // the last one has joined since
        std::string lost = loss_of_joined(*c);
        if (const std::string found = meeting->look(missing, company); lost.empty() || meeting->found_deadlock()) lost = found;
        if (lost.empty() && now_milliseconds() - start > patience * 1000)
            lost = std::to_string(missing.size()) + " ranks did not come in " + std::to_string(static_cast<int>(patience)) + " s (HCCL_CONNECT_TIMEOUT)";
        if (joined.load() >= c->ranks || lost.empty()) continue;
        c->seat(c->rank).left.store(1);
        munmap(c->memory, c->size);
        return fail_meeting(*meeting, "the communicator " + c->name + " of " + std::to_string(c->ranks) + " ranks", lost);
    }
    meeting.reset();
    c->id = shared.id;
    {
        Lock lock(state().mutex);
        communicators.push_back(c.get());
        note_devices(*c);
        state().failures[c->device].stopped.clear();  // a program that makes a new group has seen that an earlier one failed
        show_on_board(*c);
    }
    Communicator& made_now = *c;
    c->engine = std::thread([&made_now] { run_engine(made_now); });
    *made = c.release();
    return HCCL_SUCCESS;
}

}  // namespace

// A root info has a place and a number, because the place may be that of an earlier root info of its process.
bool make_root(char* root) {
    static std::atomic<uint64_t> made{0};
    snprintf(root + kPlace, kPlace, "%lu", static_cast<unsigned long>(++made));
    return open_root(root, kPlace);
}

std::string name_of_root(const char* root) { return std::string(root) + " " + (root + kPlace); }

// Nobody looks for the root's file any more.
void close_root(const char* place) {
    int process = 0, file = 0;
    if (sscanf(place, "/proc/%d/fd/%d", &process, &file) == 2 && process == getpid()) close(file);
}

HcclResult join(const char* place, const Company& company, uint32_t rank, std::string name, Communicator** made, const FindRanks& find) {
    HcclResult result = HCCL_SUCCESS;
    auto c = attach(place, company.ranks, rank, current_device(), std::move(name), result);
    if (c == nullptr) return result;
    result = meet_all(std::move(c), made, company.by_table, find);
    if (rank == 0) close_root(place);
    return result;
}

// All ranks are devices of this process.
HcclResult join_all(const std::vector<int32_t>& devices, Communicator** made) {
    char place[kPlace];
    if (!open_root(place, sizeof place)) return HCCL_E_SYSCALL;
    HcclResult result = HCCL_SUCCESS;
    std::vector<std::unique_ptr<Communicator>> parts;
    for (size_t rank = 0; rank < devices.size() && result == HCCL_SUCCESS; ++rank) {
        parts.push_back(attach(place, static_cast<uint32_t>(devices.size()), static_cast<uint32_t>(rank), devices[rank], "group", result));
        if (parts.back() != nullptr) result = HCCL_SUCCESS;
    }
    for (size_t rank = 0; rank < devices.size() && result == HCCL_SUCCESS; ++rank) result = meet_all(std::move(parts[rank]), &made[rank]);
    close_root(place);
    return result;
}

// A part of a communicator: its first rank shows the others the place in the parent's memory.
HcclResult join_part(Communicator& parent, const std::vector<uint32_t>& members, uint64_t number, uint32_t rank, std::string name, Communicator** made) {
    Seat& seat = parent.seat(members[0]);
    const auto process_of = [&](uint32_t member) -> Attendee {
        const Seat& theirs = parent.seat(members[member]);
        return {theirs.process.load(), theirs.board, theirs.born.load()};
    };
    if (name.empty()) name = parent.name + "_part";
    char place[kPlace];
    if (rank == 0) {
        if (!open_root(place, sizeof place)) return HCCL_E_SYSCALL;
        snprintf(seat.place, sizeof seat.place, "%s", place);
        seat.part.store(number + 1);
        wake_all(seat.arrived);
    } else {
        const double patience = seconds_from("HCCL_CONNECT_TIMEOUT", 120), start = now_milliseconds();
        std::optional<Meeting> meeting;
        while (seat.part.load() != number + 1) {
            nap(seat.arrived, seat.arrived.load(), kNap);
            if (seat.part.load() == number + 1) break;
            if (!meeting) meeting.emplace("rank " + std::to_string(rank) + " of " + name);
            std::string lost = loss(parent, members[0]);
            if (!lost.empty()) lost = "rank 0 " + lost;
            if (const std::string found = meeting->look({{0, process_of(0)}}, {}); lost.empty() || meeting->found_deadlock()) lost = found;
            if (lost.empty() && now_milliseconds() - start > patience * 1000) lost = "rank 0 did not come";
            if (seat.part.load() != number + 1 && !lost.empty()) return fail_meeting(*meeting, name + ", a part of " + parent.name + ",", lost);
        }
        snprintf(place, sizeof place, "%s", seat.place);
    }
    const HcclResult result = join(place, {static_cast<uint32_t>(members.size())}, rank, std::move(name), made, [&](std::vector<Attendee>& ranks) {
        for (uint32_t member = 0; member < ranks.size(); ++member) ranks[member] = process_of(member);
        return std::string();
    });
    if (rank == 0) seat.part.store(0);
    return result;
}

namespace {

// A socket of this user and rank table, without a file.
sockaddr_un address_of(const std::string& table, socklen_t& length) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "npu_emulator.%u.%zx", getuid(), std::hash<std::string>{}(table));
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + strlen(address.sun_path + 1));
    return address;
}

// Tells the place to each other rank that connects.
void tell_place(int listener, uint32_t others, const char* place) {
    for (; others > 0; --others) {
        const int peer = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
        if (peer < 0) return;
        (void)!write(peer, place, kPlace);
        close(peer);
    }
}

HcclResult ask_place(const std::string& table, const char* path, const Company& company, uint32_t rank, char* place) {
    socklen_t length = 0;
    const sockaddr_un address = address_of(table, length);
    const double patience = seconds_from("HCCL_CONNECT_TIMEOUT", 120), start = now_milliseconds();
    std::optional<Meeting> meeting;
    for (std::string lost;; usleep(kNap * 1000)) {
        const int peer = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        const bool told = connect(peer, reinterpret_cast<const sockaddr*>(&address), length) == 0 && read(peer, place, kPlace) == static_cast<ssize_t>(kPlace);
        close(peer);
        if (told) return HCCL_SUCCESS;
        if (!lost.empty()) return fail_meeting(*meeting, std::string("the group of the rank table ") + path, lost);  // rank 0 has not come since
        if (!meeting) meeting.emplace("rank " + std::to_string(rank) + " of the rank table " + path);
        lost = meeting->look({{0, {}}}, company);
        if (lost.empty() && now_milliseconds() - start > patience * 1000) lost = "rank 0 did not come in " + std::to_string(static_cast<int>(patience)) + " s (HCCL_CONNECT_TIMEOUT)";
    }
}

}  // namespace

// By a rank table: a file in JSON that names each rank once.
HcclResult join_table(const char* path, uint32_t rank, Communicator** made) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    const std::string table = text.str(), key = "\"rank_id\"";
    uint32_t ranks = 0;
    for (size_t at = table.find(key); at != std::string::npos; at = table.find(key, at + 1)) ++ranks;
    if (rank >= ranks) {
        fail(ACL_ERROR_RT_PARAM_INVALID, std::string("the rank table ") + path + " has " + std::to_string(ranks) + " ranks and not rank " + std::to_string(rank), "name a rank table in JSON, with each rank");
        return HCCL_E_PARA;
    }
    char place[kPlace] = "";
    if (rank != 0) {
        const HcclResult told = ask_place(table, path, {ranks, true}, rank, place);
        return told != HCCL_SUCCESS ? told : join(place, {ranks, true}, rank, "group", made);
    }
    socklen_t length = 0;
    const sockaddr_un address = address_of(table, length);
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (!open_root(place, sizeof place) || bind(listener, reinterpret_cast<const sockaddr*>(&address), length) != 0 || listen(listener, 64) != 0) {
        close(listener);
        fail(ACL_ERROR_RT_PARAM_INVALID, std::string("the rank table ") + path + " is in use by other ranks, or sockets fail (" + strerror(errno) + ")", "give each group a table of its own");
        return HCCL_E_SYSCALL;
    }
    std::thread teller([&] { tell_place(listener, ranks - 1, place); });
    const HcclResult result = join(place, {ranks, true}, rank, "group", made);
    shutdown(listener, SHUT_RDWR);
    teller.join();
    close(listener);
    return result;
}

// What has not ended ends with an error. The object stays: tasks on streams and in graphs may still name it.
HcclResult leave(Communicator* c) {
    c->stop.store(true);
    c->seat(c->rank).left.store(1);
    for (uint32_t other = 0; other < c->ranks; ++other) ring(c->seat(other).bell);
    {
        WithoutGil guard;  // the engine may be inside a kernel
        c->engine.join();
    }
    wake_all(c->seat(c->rank).arrived);
    Lock lock(state().mutex);
    communicators.erase(std::find(communicators.begin(), communicators.end(), c));
    hide_from_board(*c);
    static auto& parted = *new std::vector<std::unique_ptr<Communicator>>;
    parted.emplace_back(c);
    munmap(std::exchange(c->memory, nullptr), c->size);
    for (Communicator::Job& job : std::exchange(c->jobs, {})) job.finished(refuse_destroyed(*c, false));
    state().changed.notify_all();
    return HCCL_SUCCESS;
}

}  // namespace emu
