// The common types of the emulated CANN runtime: tasks, streams, events, captured graphs, and the one device state.
//
// The types of the C interface are those of cann.h, which a test compares with the headers of torch_npu's wheel.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "cann.h"

#define EMU_API extern "C" __attribute__((visibility("default")))

namespace emu {

// One `record` of an event. A later record of the same event is another ticket, so a wait waits for the record that was the
// latest at its launch (the rule of cudaStreamWaitEvent, which aclrtStreamWaitEvent follows).
struct Ticket {
    uint64_t id = 0;
    bool done = false;
    double milliseconds = 0;  // host clock when it ran
    int32_t device = 0;       // of the stream on which it was recorded
    bool external = false;    // the flag of an external event
};
using TicketRef = std::shared_ptr<Ticket>;

struct Graph;
using GraphRef = std::shared_ptr<Graph>;

// Tasks of a captured graph that may be replaced between replays (groups.cpp).
struct Group {
    std::weak_ptr<Graph> graph;
    std::vector<uint32_t> tasks;
};
using GroupRef = std::shared_ptr<Group>;

enum class Kind : uint8_t { Kernel, Copy, Fill, HostCall, Record, Wait, Replay, ValueWrite, ValueWait, Update, Reset, Spoil, Collective };

// The modes of Kind::Spoil: bytes 0xFF, and marks of unwritten bytes; in a graph also whether the contents at the beginning of a
// replay are of no use.
constexpr uint64_t kPoison = 1, kMarkUnwritten = 2, kSpoilAtStart = 4;

// Memory that was freed while work was queued, and how it is spoiled as soon as nothing is.
struct Freed {
    size_t bytes = 0;
    uint64_t how = 0;
};

struct Exchange;

struct Task {
    Kind kind = Kind::Kernel;
    uint32_t op = 0;           // index into the table of operator names (Kernel only)
    uint64_t kernel = 0;       // number of the Python kernel (Kernel only)
    void* destination = nullptr;
    const void* source = nullptr;
    size_t bytes = 0;          // length; for ValueWait the comparison
    uint64_t value = 0;        // cores of a Kernel's stream at its launch, byte for Fill, word for ValueWrite and ValueWait, number of a Replay, mode of Spoil
    void (*host_function)(void*) = nullptr;
    void* argument = nullptr;
    int64_t edge = -1;         // inside a graph: index of the task that a Wait waits for
    TicketRef ticket;          // Record fires it, Wait waits for it (outside graphs and for external events)
    GraphRef graph;            // Replay only, with a seed for each generator that the graph draws from
    std::vector<uint64_t> seeds;
    uint64_t moment = 0;       // Replay only: `State::moment` at its launch
    GroupRef group;            // Update only, with the replacements of the group's tasks
    std::vector<Task> replacements;
    std::shared_ptr<const Exchange> exchange;  // Collective only
    uint64_t place = 0;        // Copy and Fill: as in `Note`
};

struct Event;

// One captured stream: its tasks in order, and the tasks of other captured streams that are ordered before.
struct Lane {
    std::vector<uint32_t> tasks;
    std::map<uint32_t, int64_t> seen;  // lane -> last task index of it that is ordered before this lane's next task
};

// A block that was allocated in a capture, with the task that spoils the bytes of it that the graph uses.
struct Allocation {
    size_t bytes = 0;
    uint32_t task = 0;
};

struct Graph {
    uint32_t id = 0;
    int32_t device = 0;
    uint32_t origin = 0;
    aclmdlRICaptureMode mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
    std::thread::id thread;
    aclmdlRICaptureStatus status = ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
    std::vector<Task> tasks;
    std::vector<uint32_t> lane_of;  // task index -> lane
    std::vector<Lane> lanes;
    std::vector<GroupRef> groups;
    uint64_t memory = 0;         // bytes that the capture allocated from the device for its pool
    uint64_t replays = 0;        // number of launches
    uint64_t launched_before = 0;  // `State::launched` at the beginning of the capture
    uint32_t generators = 0;     // number of random generators that its kernels use
    bool waits_outside = false;  // some task waits for an event or value from outside the graph
    std::map<int64_t, std::map<uint32_t, int64_t>> seen_at_record;  // record -> the tasks ordered before it
    std::vector<struct Stream*> streams;  // lane -> the captured stream
    std::map<char*, Allocation> allocated;  // by address; the last one there
    std::map<char*, char*> inherited;       // memory used before the capture allocated it: first byte -> one past the last
    ~Graph();
};

// One active replay, if the schedule may interleave it with other work.
struct Run {
    GraphRef graph;
    std::vector<uint32_t> next;  // per lane
    std::vector<bool> done;      // per task
    std::vector<bool> away;      // per lane: its next task is a collective that has started and not finished
    size_t left = 0;
    struct Stream* stream = nullptr;
    std::vector<uint64_t> seeds;
    uint64_t replay = 0;  // its number among the graph's replays
    uint64_t moment = 0;  // of its launch
};

struct Stream {
    int32_t id = 0;
    int32_t device = 0;
    uint32_t priority = 0;  // a smaller number is more urgent
    std::deque<std::pair<uint64_t, Task>> queue;  // (launch number, task)
    bool replaying = false;                       // the head is a Replay whose Run has started
    bool away = false;                            // the head is a collective that has started and not finished
    GraphRef capture;
    uint32_t lane = 0;
    GroupRef group;                  // the task group of the present capture
    std::shared_ptr<Task> updating;  // the update that collects launches
    std::map<int, uint32_t> limits;  // aclrtDevResLimitType -> cores
};

struct Event {
    uint32_t flags = 0;
    TicketRef ticket;
    std::weak_ptr<Graph> captured_in;  // the capture that last recorded it, if it was recorded inside one
    int64_t captured_task = -1;
};

// One line of the log that checkers read (trace.cpp).
struct Note {
    uint64_t kind = 0, stream = 0, first = 0, second = 0, third = 0;
    uint64_t graph = 0, index = 0, edge = 0;  // captured task: graph id, task index, 1 + the record that it waits for;
                                              // work in a replay: graph id, replay, lane
    uint64_t place = 0;                       // copy or fill: Python's number for the lines that launched it, or 0
};

// The costs of one captured graph, kept after the graph is destroyed.
struct Cost {
    uint64_t graph = 0, streams = 0, events = 0, kernels = 0, others = 0, memory = 0, alive = 0;
};

enum class Policy { Fifo, Lazy, Random, Pct, Choices };

// A place where a task could run next: the head of a stream, or of one lane of an active replay.
struct Choice {
    uint64_t order = 0;
    Stream* stream = nullptr;
    Run* run = nullptr;
    uint32_t lane = 0;
    std::shared_ptr<struct Away> away;  // the choice is to wait for the end of this collective
};

// A collective that has started. Where it is held (standstill.cpp), its stream goes on only when the schedule says so.
struct Away {
    Choice place;
    bool held = false, ended = false;
    bool released = false;   // the schedule does not wait for it at present
    bool suspended = false;  // and its engine does not go on before that
    std::function<void()> finish;
};
using AwayRef = std::shared_ptr<Away>;

// What an asynchronous task of a device met; the next synchronisation with the device reports it.
struct Failure {
    aclError code = ACL_SUCCESS;
    std::string message, advice;
    std::string stopped;  // why collectives fail at once: one has failed, and the program does not know yet
};

struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::unique_ptr<Stream>> streams;
    std::vector<std::unique_ptr<Run>> runs;
    std::map<int32_t, Stream*> default_stream;
    int32_t next_stream = 0;
    uint32_t next_graph = 0;
    uint64_t launched = 0;
    size_t pending = 0;       // tasks in queues that have not finished
    size_t away = 0;          // collectives that have started and not ended
    AwayRef held;             // the collective for which the device waits (standstill.cpp)
    std::vector<AwayRef> deferred;  // held collectives for which it does not wait at present
    bool draining = false;    // an engine runs the queue of a program that waits outside the device
    uint64_t calls = 0;       // launches, and waits for the device
    uint64_t queries = 0;     // of events and streams, by `launchers`
    std::map<char*, Freed> freed;  // memory that queued work may still use
    bool busy = false;        // a thread is executing a task
    bool immediate = false;   // which is an eager operator, in Python
    std::set<std::thread::id> launchers;  // threads that have launched work, but for those of autograd, which work for others
    std::map<std::thread::id, const std::function<bool()>*> waiting;  // threads that wait for the device -> whether that is over
    std::map<std::thread::id, int32_t> meeting;  // threads, with the system's numbers, that wait for ranks of a new communicator
    std::thread::id owner;    // which
    uint64_t moment = 0;         // counts what the allocator did
    uint64_t replay_moment = 0;  // `moment` at the launch of the replay that runs now
    std::atomic<Policy> policy{Policy::Fifo};  // atomic: engines read it without the lock
    std::mt19937_64 random;
    std::vector<uint32_t> choices;                           // Policy::Choices: the given choices
    std::vector<std::pair<uint32_t, uint32_t>> decisions;    // Policy::Choices: (choice, number of candidates)
    std::atomic<bool> null_kernels{false};  // atomic, as `logging`: read without the lock where work runs
    std::atomic<bool> tracing{false};  // written with the lock held
    std::deque<Note> notes;
    std::atomic<bool> logging{false};
    std::deque<Note> ran;  // the work that ran, in order
    uint64_t next_ticket = 1;
    uint64_t stream_budget = 2048;
    uint64_t event_budget = 65536;
    uint64_t events = 0;
    std::vector<Cost> costs;  // of every capture so far
    std::vector<std::string> op_names;
    std::vector<uint64_t> executed;    // per operator: kernels run, replays included
    std::vector<uint64_t> released;    // Python kernels that can no longer run
    std::unordered_set<Graph*> capturing;
    std::unordered_map<void*, GraphRef> graphs;  // handles given to torch_npu
    std::unordered_map<void*, std::weak_ptr<Group>> groups;
    std::map<int32_t, Failure> failures;  // by device
    int32_t executing = 0;                // the device whose task is executed
};

State& state();

using Lock = std::unique_lock<std::mutex>;

// streams and scheduling (scheduler.cpp)
Stream* resolve(aclrtStream handle);
bool replay_at_once(Stream* stream, const Task& replay, Lock& lock);
aclError submit(Stream* stream, Task task, Lock& lock);
void run_what_is_due(Lock& lock);
// Whether no task can run until a collective ends, and every thread that launches waits for that, or for ranks of a communicator
// that is being made.
bool is_blocked(Lock& lock);
bool everybody_waits();
bool some_wait_is_over();
// Whether the device goes on if it waits for this collective.
bool can_end(const AwayRef& away);
std::vector<Choice> choices(State& s);
// Waits until no engine drains the queue (standstill.cpp), so that what the program does next does not mix with that.
void wait_for_drain(Lock& lock);
// This thread launches work, or will: it has made a communicator. With the lock held.
void launches_here();
// The process goes on (deadlocks.cpp).
void goes_on();
void spoil(void* address, size_t bytes, uint64_t how);
void submit_spoiling(Stream* stream, Task task, Lock& lock);
void spoil_when_idle(char* address, Freed freed);
void wait_for_change(Lock& lock);
aclError wait_for_stream(Lock& lock, Stream* stream);
aclError wait_for_device(Lock& lock, int32_t device);
aclError wait_for_ticket(Lock& lock, const TicketRef& ticket);
bool step(Lock& lock, Stream* wanted);
aclError take_failure(int32_t device, Lock& lock);

// the order of a rank whatever the time at which others come (standstill.cpp)
bool holds_collectives();
bool resume_held(State& s);
void forget_held(State& s, const AwayRef& away);
void let_go(State& s);
bool look_for_standstill(Lock& lock);
bool is_watched();

// collectives (communicator.cpp)
void start_exchange(const std::shared_ptr<const Exchange>& exchange, AwayRef away, std::function<void(aclError)> finished);

// policy (policy.cpp)
const Choice& pick(const std::vector<Choice>& found, const Stream* wanted);
uint64_t steps_at_launch();
void choose_policy(Policy policy, uint64_t seed, uint32_t depth);

// the log for checkers (trace.cpp)
uint64_t place_of_caller();  // asks Python, so not with the lock held
void note_launch(const Stream* stream, const Task& task);
void note_messages(const Stream* stream, const Exchange& exchange);
std::vector<Note> ranges_of(const Exchange& exchange);
void note_devices(const struct Communicator& c);
void note_captured(const Graph& graph, uint32_t lane, uint32_t index, const Task& task);
void note_ran(const Stream* stream, const Task& task, const Graph* graph, uint64_t replay, uint32_t lane);
void note_stream_finished(const Stream* stream);
void note_device_finished();
void note_ticket_finished(const TicketRef& ticket);
void note_ticket_free(const TicketRef& ticket);  // the allocator knows that it has fired

// budgets (budgets.cpp)
uint64_t streams_in_use();
void note_cost(const Graph& graph);
void charge_capture(uint64_t bytes);
aclError no_stream_left(const char* wanted);

// task groups (groups.cpp)
void replace_tasks(const Task& update);

// capture (capture.cpp)
bool capture_forbids_here(Lock& lock);
bool captures_on(Lock& lock, int32_t device);
// 107030, for an operation that a capture does not permit; success where a measured device permits it.
aclError refuse_in_capture(const char* decision, const char* operation, const char* advice = "move it out of the captured region");
// Whether every active capture belongs to another thread.
bool only_others_capture(Lock& lock);
aclError append(Stream* stream, Task task, Lock& lock);
// Memory that the next task of a capture reads or writes.
void note_use(Graph& graph, const void* address, size_t bytes);

// memory (memory.cpp)
int32_t device_of(const void* pointer);
bool is_pinned_host(const void* pointer);
bool is_outside_allocations(const void* pointer, size_t bytes);
// The cause of 507011, with `what` its subject and verb: "aclrtMemcpy reads".
constexpr const char* kKeepAllocated = "keep memory allocated until the work on it, replays included, has run, and check its size";
std::string outside_allocations(const char* what, const void* pointer, size_t bytes);

// memory that processes share (ipc_memory.cpp), with the lock of the allocations held
bool is_imported(const char* address);
void end_export(char* address);

// bytes never written (shadow.cpp)
void clear_unwritten(const void* pointer, size_t bytes);
void copy_unwritten(const void* destination, const void* source, size_t bytes);
void mark_unwritten(const void* pointer, size_t bytes);

// device and errors (device.cpp)
int32_t current_device();
// The cores of a stream: cube cores in the upper 32 bits, vector cores in the lower.
uint64_t cores_of(const Stream* stream);
// The code that a measured device gives for a decision (npu_emulator/measured.py), or else the usual one.
aclError answered(const char* decision, aclError usual);
void set_answer(const char* decision, aclError code);
// Stores for the thread the cause of a failed call and the remedy; returns the code.
aclError fail(aclError code, const std::string& cause, const std::string& advice);
double now_milliseconds();

// Around a call from C++ to Python: Ctrl-C waits until the call has ended, or until it is delivered (interrupts.cpp).
class Uninterrupted {
  public:
    explicit Uninterrupted(bool delivers = true);
    ~Uninterrupted();
    Uninterrupted(const Uninterrupted&) = delete;

  private:
    struct sigaction before_;
    bool delivers_, outermost_ = false, noting_ = false;
};

void deliver_interrupts();
bool was_interrupted();  // in a call to Python

// Python (python_api.cpp)
extern std::atomic<int (*)(uint64_t kernel, const uint64_t* seeds)> python_kernel;
extern std::atomic<void (*)(uint64_t graph, uint64_t* seeds)> python_seeds;
extern std::atomic<void (*)(uint64_t graph)> python_capture_ends;
extern std::atomic<void (*)()> python_replayed;
extern std::atomic<void (*)(char* text, uint64_t capacity)> python_line, python_stack;
extern std::atomic<uint64_t (*)()> python_place;  // for `Note::place`
// Knows the communicator of a root info: writes for a person which one it is, and the processes of its ranks as far as they are
// known, as 3 numbers each: process, file of its board, birth. False if it knows nothing of that root info.
extern std::atomic<int (*)(const char* root, char* name, uint64_t capacity, uint64_t* ranks, uint64_t count)> python_ranks;
// Knows the wait of torch_npu for a key of a group's store: writes for a person whose wait it is, and as numbers the ranks of the
// communicator, the rank that sets the key, its process as above, and the seconds that the wait may last. False if the key is there.
// With a root info: torch_npu puts that there.
extern std::atomic<int (*)(void* store, const char* key, const char* root, char* whose, uint64_t capacity, uint64_t* numbers)> python_store;
aclError start_python();

}  // namespace emu
