// Ranks find each other through a file without a name (memfd) of the root's process, so that nothing remains after a crash.
// Each rank has an engine, a thread that runs its collectives in order, as the device would: the program goes on meanwhile.
#include "communicator.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emu {
namespace {

constexpr long kNap = 20;  // milliseconds between two looks at whether the others live

struct Shared {
    std::atomic<uint32_t> joined;
};

uint64_t page_up(uint64_t bytes) { return (bytes + 65535) / 65536 * 65536; }
uint64_t seats_at() { return 64; }
uint64_t mailboxes_at(uint64_t ranks) { return seats_at() + ranks * sizeof(Seat); }
uint64_t amounts_at(uint64_t ranks) { return mailboxes_at(ranks) + ranks * ranks * sizeof(Mailbox); }
uint64_t windows_at(uint64_t ranks) { return page_up(amounts_at(ranks) + 2 * ranks * 2 * ranks * sizeof(uint64_t)); }
uint64_t messages_at(uint64_t ranks) { return windows_at(ranks) + 2 * ranks * kWindow; }
uint64_t whole(uint64_t ranks) { return messages_at(ranks) + ranks * ranks * kMessage; }

void nap(std::atomic<uint32_t>& word, uint32_t seen, long milliseconds) {
    const timespec limit{milliseconds / 1000, milliseconds % 1000 * 1000000};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// The time at which a process started; 0 if it has ended.
uint64_t birth_of(int32_t process) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    FILE* file = fopen(path, "r");
    if (file == nullptr) return 0;
    const size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    const char* rest = strrchr(text, ')');  // the name before it may hold anything
    if (rest == nullptr || rest[1] == 0 || rest[2] == 'Z' || rest[2] == 'X') return 0;
    rest += 2;
    for (int field = 3; field < 22 && rest != nullptr; ++field) rest = strchr(rest + 1, ' ');
    return rest == nullptr ? 0 : strtoull(rest, nullptr, 10);
}

double seconds_from(const char* variable, double otherwise) {
    const char* given = getenv(variable);
    const double value = given == nullptr ? 0 : strtod(given, nullptr);
    return value > 0 ? value : otherwise;
}

// What is wrong with a rank that is waited for; empty if it may still come.
std::string loss(Communicator& c, uint32_t other) {
    Seat& seat = c.seat(other);
    if (seat.left.load()) return "has left the communicator";
    if (seat.process.load() == getpid()) return "";  // a rank in another thread; an emulated processor dates each thread by itself
    if (birth_of(seat.process.load()) != seat.born.load()) return "has ended (process " + std::to_string(seat.process.load()) + ")";
    return "";
}

std::vector<Communicator*> alive;  // those of this process; guarded by the runtime's lock

void run_engine(Communicator& c) {
    Seat& mine = c.seat(c.rank);
    State& s = state();
    while (!c.stop.load()) {
        const uint32_t seen = mine.bell.load();
        Communicator::Job job;
        bool advanced = false;
        {
            Lock lock(s.mutex);
            if (!c.jobs.empty()) {
                job = std::move(c.jobs.front());
                c.jobs.pop_front();
            } else if (mine.waiters.load() != 0 && !s.busy && s.pending != 0) {
                advanced = step(lock, nullptr);  // another rank waits for work that this program has launched
                s.changed.notify_all();
            }
        }
        if (job.exchange) {
            const aclError status = s.null_kernels ? ACL_SUCCESS : run_exchange(*job.exchange);
            Lock lock(s.mutex);
            job.finished(status);
            s.changed.notify_all();
        } else if (!advanced) {
            nap(mine.bell, seen, mine.waiters.load() != 0 ? 1 : 200);
        }
    }
}

}  // namespace

Seat& Communicator::seat(uint32_t of) const { return reinterpret_cast<Seat*>(memory + seats_at())[of]; }
Mailbox& Communicator::mailbox(uint32_t from, uint32_t to) const {
    return reinterpret_cast<Mailbox*>(memory + mailboxes_at(ranks))[from * ranks + to];
}
char* Communicator::window(uint32_t of, uint32_t parity) const { return memory + windows_at(ranks) + (2 * of + parity) * kWindow; }
uint64_t* Communicator::amounts(uint32_t of, uint32_t parity) const {
    return reinterpret_cast<uint64_t*>(memory + amounts_at(ranks)) + (2 * of + parity) * 2 * ranks;
}
char* Communicator::message(uint32_t from, uint32_t to) const {
    return memory + messages_at(ranks) + (uint64_t{from} * ranks + to) * kMessage;
}

Communicator* find_communicator(const std::string& name, int32_t device) {
    Lock lock(state().mutex);
    const auto found = std::find_if(alive.rbegin(), alive.rend(), [&](const Communicator* c) { return c->name == name && c->device == device; });
    return found == alive.rend() ? nullptr : *found;
}

void ring(std::atomic<uint32_t>& bell) {
    bell.fetch_add(1);
    wake_all(bell);
}

// Makes the file of a new communicator and writes where it is found. Rank 0 closes it when all ranks have joined.
bool open_root(char* place, size_t capacity) {
    const int file = memfd_create("npu_emulator", MFD_CLOEXEC);
    if (file < 0) return false;
    snprintf(place, capacity, "/proc/%d/fd/%d", getpid(), file);
    return true;
}

aclError fail_communicator(Communicator& c, HcclResult result, aclError code, const std::string& text) {
    State& s = state();
    {
        Lock lock(s.mutex);
        if (c.failed.load() == HCCL_SUCCESS) {
            c.failure = text;
            c.failed.store(result);
        }
        if (s.failure == ACL_SUCCESS) s.failure_message = text;
    }
    c.seat(c.rank).left.store(1);
    for (uint32_t other = 0; other < c.ranks; ++other) ring(c.seat(other).bell);
    wake_all(c.seat(c.rank).arrived);
    return code;
}

aclError await(Communicator& c, uint32_t other, std::atomic<uint32_t>& word, const std::function<bool()>& ready) {
    if (ready()) return ACL_SUCCESS;
    const double patience = seconds_from("HCCL_EXEC_TIMEOUT", 1836);
    Seat& seat = c.seat(other);
    seat.waiters.fetch_add(1);
    ring(seat.bell);
    const auto start = now_milliseconds();
    aclError status = ACL_SUCCESS;
    while (true) {
        const uint32_t seen = word.load();
        if (ready()) break;
        if (c.stop.load()) {
            status = ACL_ERROR_RT_SUSPECT_REMOTE_ERROR;
            break;
        }
        nap(word, seen, kNap);
        if (ready()) break;
        const std::string lost = loss(c, other);
        if (!lost.empty() && !ready()) {
            status = fail_communicator(c, HCCL_E_REMOTE, ACL_ERROR_RT_SUSPECT_REMOTE_ERROR,
                                       "rank " + std::to_string(c.rank) + " waits for rank " + std::to_string(other) + " of " + c.name +
                                           ", which " + lost);
            break;
        }
        if (now_milliseconds() - start > patience * 1000) {
            status = fail_communicator(c, HCCL_E_TIMEOUT, ACL_ERROR_RT_FFTS_PLUS_TIMEOUT,
                                       "rank " + std::to_string(c.rank) + " has waited " + std::to_string(static_cast<int>(patience)) +
                                           " s for rank " + std::to_string(other) + " of " + c.name + " (HCCL_EXEC_TIMEOUT)");
            break;
        }
    }
    seat.waiters.fetch_sub(1);
    return status;
}

// Waits until every rank has reached this round.
aclError meet(Communicator& c) {
    const uint32_t round = ++c.round;
    std::atomic<uint32_t>& mine = c.seat(c.rank).arrived;
    mine.store(round);
    wake_all(mine);
    for (uint32_t other = 0; other < c.ranks; ++other) {
        std::atomic<uint32_t>& theirs = c.seat(other).arrived;
        const aclError status = await(c, other, theirs, [&] { return static_cast<int32_t>(theirs.load() - round) >= 0; });
        if (status != ACL_SUCCESS) return status;
    }
    return ACL_SUCCESS;
}

// With the runtime's lock held. Collectives of one communicator run in the order of their start.
void start_exchange(const std::shared_ptr<const Exchange>& exchange, std::function<void(aclError)> finished) {
    Communicator& c = *exchange->communicator;
    c.jobs.push_back({exchange, std::move(finished)});
    ring(c.seat(c.rank).bell);
}

HcclResult join(const char* place, uint32_t ranks, uint32_t rank, std::string name, Communicator** made) {
    if (ranks == 0 || rank >= ranks) {
        fail(ACL_ERROR_RT_PARAM_INVALID, "a communicator of " + std::to_string(ranks) + " ranks has no rank " + std::to_string(rank), "number ranks from 0");
        return HCCL_E_PARA;
    }
    const int file = open(place, O_RDWR | O_CLOEXEC);
    if (file < 0) {
        fail(ACL_ERROR_RT_PARAM_INVALID, std::string("the emulated HCCL cannot reach rank 0 at ") + place + " (" + strerror(errno) + ")",
             "run all ranks on one machine, as one user, while rank 0 lives");
        return HCCL_E_TCP_CONNECT;
    }
    const uint64_t size = whole(ranks);
    void* memory = ftruncate(file, static_cast<off_t>(size)) != 0 ? MAP_FAILED : mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (memory == MAP_FAILED) {
        fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the emulated HCCL has no memory for a communicator (" + std::string(strerror(errno)) + ")", "free memory");
        return HCCL_E_SYSCALL;
    }
    auto c = std::make_unique<Communicator>();
    c->name = std::move(name);
    c->ranks = ranks;
    c->rank = rank;
    c->device = current_device();
    c->memory = static_cast<char*>(memory);
    c->size = size;
    c->seat(rank).born.store(birth_of(getpid()));
    c->seat(rank).process.store(getpid());
    std::atomic<uint32_t>& joined = reinterpret_cast<Shared*>(memory)->joined;
    joined.fetch_add(1);
    wake_all(joined);
    const double patience = seconds_from("HCCL_CONNECT_TIMEOUT", 120), start = now_milliseconds();
    while (joined.load() < ranks) {
        nap(joined, joined.load(), kNap);
        std::string lost;
        for (uint32_t other = 0; other < ranks && lost.empty(); ++other)
            if (c->seat(other).process.load() != 0 && !(lost = loss(*c, other)).empty()) lost = "rank " + std::to_string(other) + " " + lost;
        if (lost.empty() && now_milliseconds() - start > patience * 1000)
            lost = std::to_string(ranks - joined.load()) + " ranks did not come in " + std::to_string(static_cast<int>(patience)) + " s (HCCL_CONNECT_TIMEOUT)";
        if (joined.load() >= ranks || lost.empty()) continue;
        c->seat(rank).left.store(1);
        munmap(memory, size);
        fail(ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, "the communicator " + c->name + " of " + std::to_string(ranks) + " ranks was not made: " + lost,
             "start every rank of the group");
        return HCCL_E_TIMEOUT;
    }
    int process = 0, root = 0;  // nobody looks for the root's file any more
    if (sscanf(place, "/proc/%d/fd/%d", &process, &root) == 2 && process == getpid() && rank == 0) close(root);
    Communicator& made_now = *c;
    c->engine = std::thread([&made_now] { run_engine(made_now); });
    {
        Lock lock(state().mutex);
        alive.push_back(c.get());
    }
    *made = c.release();
    return HCCL_SUCCESS;
}

// The work in its queue has finished: the caller has waited for the device.
HcclResult leave(Communicator* communicator) {
    std::unique_ptr<Communicator> c(communicator);
    c->stop.store(true);
    {
        Lock lock(state().mutex);
        alive.erase(std::remove(alive.begin(), alive.end(), c.get()), alive.end());
    }
    c->seat(c->rank).left.store(1);
    for (uint32_t other = 0; other < c->ranks; ++other) ring(c->seat(other).bell);
    {
        WithoutGil guard;  // the engine may be inside a kernel
        c->engine.join();
    }
    wake_all(c->seat(c->rank).arrived);
    munmap(c->memory, c->size);
    return HCCL_SUCCESS;
}

}  // namespace emu
