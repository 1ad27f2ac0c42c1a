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
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace emu {
namespace {

constexpr long kNap = 20;  // milliseconds between two looks at whether the others live

struct Shared {
    std::atomic<uint32_t> joined;
    uint64_t id;
};

// Of a communicator, unlike that of any other on the machine.
uint64_t new_id() {
    static std::atomic<uint32_t> made{0};
    return uint64_t{static_cast<uint32_t>(getpid())} << 32 | ++made;
}

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
    if (seat.left.load()) return seat.failure[0] == 0 ? "has left the communicator" : std::string("has failed: ") + seat.failure;
    if (seat.process.load() == getpid()) return "";  // a rank in another thread; an emulated processor dates each thread by itself
    if (birth_of(seat.process.load()) != seat.born.load())
        return "has ended (process " + std::to_string(seat.process.load()) + ")" + last_call_of(seat.process.load(), seat.born.load());
    return "";
}

// Faults on purpose (npu_emulator/faults.py), by device and number of the collective; guarded by the runtime's lock.
enum class FaultKind : uint64_t { Kill, Delay, Drop };
struct Fault {
    FaultKind kind;
    uint64_t milliseconds;
};
std::map<std::pair<uint64_t, uint64_t>, Fault> faults;
std::map<uint64_t, uint64_t> begun;  // device -> collectives since the faults were set

aclError suffer(Communicator& c) {
    Fault fault{};
    {
        Lock lock(state().mutex);
        if (faults.empty()) return ACL_SUCCESS;
        const auto device = static_cast<uint64_t>(c.device);
        const auto found = faults.find({device, ++begun[device]});
        if (found == faults.end()) return ACL_SUCCESS;
        fault = found->second;
    }
    if (fault.kind == FaultKind::Kill) kill(getpid(), SIGKILL);
    if (fault.kind == FaultKind::Drop)
        return fail_communicator(c, HCCL_E_REMOTE, ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, "the connection of device " + std::to_string(c.device) + " was dropped on purpose");
    for (uint64_t passed = 0; passed < fault.milliseconds && !c.stop.load(); passed += kNap) usleep(kNap * 1000);
    return ACL_SUCCESS;
}

std::vector<Communicator*> communicators;  // of this process, in the order of their beginning; guarded by the runtime's lock

std::set<int32_t> engines;  // their threads; guarded by the runtime's lock

void run_engine(Communicator& c) {
    Seat& mine = c.seat(c.rank);
    State& s = state();
    const auto thread = static_cast<int32_t>(gettid());
    {
        Lock lock(s.mutex);
        engines.insert(thread);
    }
    while (!c.stop.load()) {
        const uint32_t seen = mine.bell.load();
        Communicator::Job job;
        bool advanced = false, soon = false;
        {
            Lock lock(s.mutex);
            if (!c.jobs.empty()) {
                job = std::move(c.jobs.front());
                c.jobs.pop_front();
                c.working = true;
                c.running = job.exchange.get();
                c.away = job.away;
                note_call(*job.exchange, job.exchange->kind == Collective::SendReceive ? 0 : c.number + 1, Progress::Begun);
            } else {
                soon = look_for_standstill(lock) || mine.waiters.load() != 0;
                if (soon && s.policy == Policy::Fifo && !s.busy && s.pending != 0) {
                    advanced = step(lock, nullptr);  // another rank waits for work that this program has launched
                    s.changed.notify_all();
                }
            }
        }
        if (job.exchange) {
            aclError status = s.null_kernels ? ACL_SUCCESS : suffer(c);
            wait_until_held(c);
            if (status == ACL_SUCCESS && !s.null_kernels) status = run_exchange(*job.exchange);
            Lock lock(s.mutex);
            if (status == ACL_SUCCESS && !s.null_kernels) {
                note_call(*job.exchange, 0, Progress::Finished);
                note_finished(c, *job.exchange);
            }
            c.working = false;
            c.running = nullptr;
            c.away.reset();
            show_working(c);
            job.finished(status);
            s.changed.notify_all();
        } else if (!advanced) {
            nap(mine.bell, seen, !soon ? 200 : s.policy == Policy::Fifo ? 1 : kNap);
        }
    }
    Lock lock(s.mutex);
    engines.erase(thread);
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
    const auto found = std::find_if(communicators.rbegin(), communicators.rend(), [&](const Communicator* c) { return c->name == name && c->device == device; });
    return found == communicators.rend() ? nullptr : *found;
}

// Whether no engine runs anything, but waits for other ranks or for jobs.
bool engines_wait() {
    return std::none_of(communicators.begin(), communicators.end(), [](const Communicator* c) { return c->working || (c->running == nullptr && !c->jobs.empty()); });
}

void note_call(const Exchange& e, uint64_t number, Progress progress) {
    static uint64_t turns = 0;
    const Communicator& c = *e.communicator;
    if (c.memory == nullptr) return;
    Seat& mine = c.seat(c.rank);
    mine.progress.store(progress);
    if (progress == Progress::Finished) return;
    mine.last = header_of(e, number);
    mine.turn.store(++turns);
}

std::string last_call_of(int32_t process, uint64_t born) {
    Lock lock(state().mutex);
    const Seat* latest = nullptr;
    std::string name;
    for (const Communicator* c : communicators)
        for (uint32_t rank = 0; rank < c->ranks; ++rank) {
            const Seat& seat = c->seat(rank);
            if (seat.process.load() != process || seat.born.load() != born || seat.turn.load() <= (latest == nullptr ? 0 : latest->turn.load())) continue;
            latest = &seat;
            name = c->name;
        }
    if (latest == nullptr) return "";
    static const char* const progress[] = {"called and not begun", "begun and not finished", "finished"};
    return "; its last call, " + std::string(progress[static_cast<uint32_t>(latest->progress.load()) % 3]) + ", was in " + name + ": " + describe(latest->last, nullptr, 0);
}

bool is_engine(int32_t thread) { return engines.count(thread) != 0; }

void ring(std::atomic<uint32_t>& bell) {
    bell.fetch_add(1);
    wake_all(bell);
}

aclError fail_communicator(Communicator& c, HcclResult result, aclError code, const std::string& text) {
    State& s = state();
    {
        Lock lock(s.mutex);
        if (c.failed.load() == HCCL_SUCCESS) {
            c.failure = text;
            c.failed.store(result);
            snprintf(c.seat(c.rank).failure, sizeof c.seat(c.rank).failure, "%s", text.c_str());
        }
        if (Failure& failure = s.failures[c.device]; failure.code == ACL_SUCCESS) failure.message = failure.stopped = text;
    }
    c.seat(c.rank).left.store(1);
    for (uint32_t other = 0; other < c.ranks; ++other) ring(c.seat(other).bell);
    wake_all(c.seat(c.rank).arrived);
    return code;
}

namespace {

// With the runtime's lock held.
aclError refuse_destroyed(const Communicator& c, bool before) {
    if (Failure& failure = state().failures[c.device]; failure.code == ACL_SUCCESS)
        failure.message = before ? "this work, launched or replayed, needs the communicator " + c.name + ", which was destroyed"
                                   : "the communicator " + c.name + " was destroyed before its collectives had ended";
    return ACL_ERROR_RT_SUSPECT_REMOTE_ERROR;
}

// An engine that waits for other ranks, which it makes run what they have queued.
class Wait {
  public:
    Wait(Communicator& c, const Awaited& awaited) : c_(c), awaited_(awaited) {
        for_each([&](uint32_t rank) {
            c_.seat(rank).waiters.fetch_add(1);
            ring(c_.seat(rank).bell);
        });
    }
    ~Wait() {
        if (shown_) {
            Lock lock(state().mutex);
            c_.working = true;
            show_working(c_);
        }
        for_each([&](uint32_t rank) { c_.seat(rank).waiters.fetch_sub(1); });
    }

    // After a first nap, so that a short wait costs nothing: what is wrong if ranks wait for each other; else empty.
    std::string deadlock() {
        Lock lock(state().mutex);
        if (!shown_) {
            c_.working = false;
            show_waiting(c_, awaited_);
        }
        shown_ = true;
        const std::string found = find_deadlock(c_, lock);
        if (found.empty()) look_for_standstill(lock);
        return found;
    }

    // Why waiting is of no use; empty if the ranks may still come.
    std::string loss_of_ranks() const {
        std::string text;
        for_each([&](uint32_t rank) {
            const std::string lost = text.empty() ? loss(c_, rank) : "";
            if (!lost.empty()) text = "rank " + std::to_string(c_.rank) + " waits for rank " + std::to_string(rank) + " of " + c_.name + ", which " + lost;
        });
        return text.empty() || c_.running == nullptr ? text : text + "\n  " + describe(c_, *c_.running);
    }

  private:
    Communicator& c_;
    const Awaited& awaited_;
    bool shown_ = false;

    template <typename Work>
    void for_each(const Work& work) const {
        for (uint32_t rank = 0; rank < c_.ranks; ++rank)
            if (awaited_.ranks.test(rank)) work(rank);
    }
};

}  // namespace

aclError await(Communicator& c, const Awaited& awaited, std::atomic<uint32_t>& word, const std::function<bool()>& ready) {
    if (ready()) return ACL_SUCCESS;
    const double patience = seconds_from("HCCL_EXEC_TIMEOUT", 1836), start = now_milliseconds();
    Wait wait(c, awaited);
    // Under fifo the others come by themselves. Elsewhere ranks in crossing order go on only when one has seen that (standstill.cpp).
    for (long length = state().policy == Policy::Fifo ? kNap : 1;; length = std::min(kNap, 2 * length)) {
        const uint32_t seen = word.load();
        if (ready()) break;
        if (c.stop.load()) {
            Lock lock(state().mutex);
            return refuse_destroyed(c, false);
        }
        nap(word, seen, length);
        if (ready()) break;
        // In this order: who finds a deadlock tells the others before it fails, and each has the deadlock's code.
        const std::string lost = wait.loss_of_ranks();
        const std::string deadlock = wait.deadlock();
        if (!deadlock.empty()) return fail_communicator(c, HCCL_E_TIMEOUT, ACL_ERROR_RT_FFTS_PLUS_TIMEOUT, deadlock);
        if (!lost.empty() && !ready()) return fail_communicator(c, HCCL_E_REMOTE, ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, lost);
        if (now_milliseconds() - start > patience * 1000)
            return fail_communicator(c, HCCL_E_TIMEOUT, ACL_ERROR_RT_FFTS_PLUS_TIMEOUT,
                                     "rank " + std::to_string(c.rank) + " has waited " + std::to_string(static_cast<int>(patience)) + " s for rank " +
                                         std::to_string(awaited.ranks._Find_first()) + " of " + c.name + " (HCCL_EXEC_TIMEOUT)");
    }
    wait_until_held(c);
    return ACL_SUCCESS;
}

// Waits until every rank has reached this round.
aclError meet(Communicator& c) {
    const uint32_t round = ++c.round;
    std::atomic<uint32_t>& mine = c.seat(c.rank).arrived;
    mine.store(round);
    wake_all(mine);
    for (uint32_t other = 0; other < c.ranks; ++other) {
        std::atomic<uint32_t>& theirs = c.seat(other).arrived;
        if (static_cast<int32_t>(theirs.load() - round) >= 0) continue;
        Awaited awaited;
        awaited.ranks.set(other);
        const aclError status = await(c, awaited, theirs, [&] { return static_cast<int32_t>(theirs.load() - round) >= 0; });
        if (status != ACL_SUCCESS) return status;
    }
    return ACL_SUCCESS;
}

// With the runtime's lock held. Collectives of one communicator run in the order of their start.
void start_exchange(const std::shared_ptr<const Exchange>& exchange, AwayRef away, std::function<void(aclError)> finished) {
    Communicator& c = *exchange->communicator;
    if (c.memory == nullptr) {
        finished(refuse_destroyed(c, true));
        return;
    }
    c.jobs.push_back({exchange, std::move(away), std::move(finished)});
    ring(c.seat(c.rank).bell);
}

}  // namespace emu

// Rows of four numbers: kind, device, number of its collective, milliseconds.
EMU_API void emu_set_faults(const uint64_t* rows, uint64_t count) {
    using namespace emu;
    Lock lock(state().mutex);
    faults.clear();
    begun.clear();
    for (const uint64_t* row = rows; row < rows + 4 * count; row += 4) faults[{row[1], row[2]}] = {static_cast<FaultKind>(row[0]), row[3]};
}
