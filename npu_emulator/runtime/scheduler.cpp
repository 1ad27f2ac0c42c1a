// The order in which work runs.
//
// A stream is a queue. A task is ready if it is the first of its queue and, if it is a wait, its ticket has fired. One thread
// at a time executes, without the lock, so a kernel may take Python's GIL. policy.cpp chooses the next ready task.
#include <cstdio>
#include <cstring>
#include <optional>
#include <utility>

#include "communicator.h"

// Weak, so that the runtime also loads in a process without Python.
extern "C" {
__attribute__((weak)) int PyGILState_Check(void);
__attribute__((weak)) void* PyEval_SaveThread(void);
__attribute__((weak)) void PyEval_RestoreThread(void*);
__attribute__((weak)) int Py_IsInitialized(void);
}

namespace emu {

std::atomic<int (*)(uint64_t, const uint64_t*)> python_kernel{nullptr};  // set by python_api.cpp
std::atomic<void (*)(uint64_t, uint64_t*)> python_seeds{nullptr};
std::atomic<void (*)(uint64_t)> python_capture_ends{nullptr};
std::atomic<void (*)()> python_replayed{nullptr};
std::atomic<void (*)(char*, uint64_t)> python_line{nullptr}, python_stack{nullptr};
std::atomic<uint64_t (*)()> python_place{nullptr};
std::atomic<int (*)(const char*, char*, uint64_t, uint64_t*, uint64_t)> python_ranks{nullptr};
std::atomic<int (*)(void*, const char*, const char*, char*, uint64_t, uint64_t*)> python_store{nullptr};

State& state() {
    static State* instance = new State;  // never destroyed, because torch_npu calls it from static destructors
    return *instance;
}

namespace {

// A thread that waits for another thread's kernel must release the GIL, which that kernel may need.
class WithoutGil {
  public:
    WithoutGil() {
        if (Py_IsInitialized != nullptr && Py_IsInitialized() && PyGILState_Check()) saved_ = PyEval_SaveThread();
    }
    ~WithoutGil() {
        if (saved_ != nullptr) PyEval_RestoreThread(saved_);
    }

  private:
    void* saved_ = nullptr;
};

// Reports device memory outside all allocations with 507011, the code of a replay over freed memory. The next synchronisation
// returns it, as on hardware.
aclError check_address(const char* what, const void* pointer, size_t bytes) {
    if (!is_outside_allocations(pointer, bytes)) return ACL_SUCCESS;
    State& s = state();
    Lock lock(s.mutex);
    if (Failure& failure = s.failures[s.executing]; failure.code == ACL_SUCCESS) failure.message = outside_allocations(what, pointer, bytes);
    return ACL_ERROR_RT_MODEL_EXECUTE;
}

aclError execute_copy(const Task& task) {
    if (state().null_kernels) return ACL_SUCCESS;
    aclError status = check_address("an asynchronous copy reads", task.source, task.bytes);
    if (status == ACL_SUCCESS) status = check_address("an asynchronous copy writes", task.destination, task.bytes);
    if (status != ACL_SUCCESS) return status;
    memmove(task.destination, task.source, task.bytes);
    copy_unwritten(task.destination, task.source, task.bytes);
    return ACL_SUCCESS;
}

aclError execute_fill(const Task& task) {
    if (state().null_kernels) return ACL_SUCCESS;
    const aclError status = check_address("an asynchronous fill writes", task.destination, task.bytes);
    if (status != ACL_SUCCESS) return status;
    memset(task.destination, static_cast<int>(task.value), task.bytes);
    clear_unwritten(task.destination, task.bytes);
    return ACL_SUCCESS;
}

}  // namespace

// Spoils memory: poison, or marks of unwritten bytes.
void spoil(void* address, size_t bytes, uint64_t how) {
    if (state().null_kernels || is_outside_allocations(address, bytes)) return;
    if ((how & kPoison) != 0) memset(address, 0xFF, bytes);
    if ((how & kMarkUnwritten) != 0) mark_unwritten(address, bytes);
}

namespace {

void execute_spoiling(const Task& task) { spoil(task.destination, task.bytes, task.value); }

void spoil_what_is_free(State& s) {
    if (s.pending != 0 || s.busy) return;
    for (const auto& [address, freed] : s.freed) spoil(address, freed.bytes, freed.how);
    s.freed.clear();
}

// Memory that is allocated again is no longer free. Whether queued work may still use a part of it.
bool forget_freed(State& s, char* start, size_t bytes) {
    char* end = start + bytes;
    bool used = false;
    auto item = s.freed.lower_bound(start);
    if (item != s.freed.begin() && std::prev(item)->first + std::prev(item)->second.bytes > start) --item;
    while (item != s.freed.end() && item->first < end) {
        const auto [from, freed] = *item;
        used = true;
        item = s.freed.erase(item);
        if (from < start) s.freed[from] = {static_cast<size_t>(start - from), freed.how};
        if (from + freed.bytes > end) s.freed[end] = {static_cast<size_t>(from + freed.bytes - end), freed.how};
    }
    return used;
}

// `seeds` are the seeds of the task's replay; null outside replays.
aclError execute(const Task& task, const uint64_t* seeds) {
    switch (task.kind) {
        case Kind::Kernel:
            if (const auto run = python_kernel.load(); run != nullptr && !state().null_kernels) {
                const Uninterrupted guard(false);
                return run(task.kernel, seeds);
            }
            return ACL_SUCCESS;
        case Kind::Copy:
            return execute_copy(task);
        case Kind::Fill:
            return execute_fill(task);
        case Kind::HostCall: {
            const Uninterrupted guard(false);
            task.host_function(task.argument);
            break;
        }
        case Kind::ValueWrite:
            *static_cast<uint64_t*>(task.destination) = task.value;
            break;
        case Kind::Spoil:
            execute_spoiling(task);
            break;
        default:
            break;
    }
    return ACL_SUCCESS;
}

void count(State& s, const Task& task) {
    if (task.kind != Kind::Kernel) return;
    if (s.executed.size() <= task.op) s.executed.resize(task.op + 1);
    ++s.executed[task.op];
}

void note_failure(State& s, int32_t device, aclError code) {
    if (code == ACL_SUCCESS) return;
    if (Failure& failure = s.failures[device]; failure.code == ACL_SUCCESS) failure.code = code;
}

// Fires or resets the ticket of a record or a reset; with the lock held.
void signal(const Task& task) {
    task.ticket->done = task.kind == Kind::Record;
    if (task.ticket->done) task.ticket->milliseconds = now_milliseconds();
}

// Runs one task without the lock. The task stays in its stream's queue, so no later task can start.
void run_task(State& s, const Stream* stream, const Task& task, const uint64_t* seeds, Lock& lock) {
    if (task.kind == Kind::Update) {
        replace_tasks(task);
        return;
    }
    if (task.kind == Kind::Record || task.kind == Kind::Reset || task.kind == Kind::Wait) {
        if (task.kind != Kind::Wait && task.ticket) signal(task);
        return;
    }
    s.busy = true;
    s.owner = std::this_thread::get_id();
    s.executing = stream->device;
    lock.unlock();
    const aclError status = execute(task, seeds);
    lock.lock();
    s.busy = false;
    count(s, task);
    note_failure(s, stream->device, status);
}

// Runs a whole graph in recorded order. This fast path is legal because recorded order respects every edge inside the graph.
void run_graph_in_order(State& s, const Stream* stream, const Task& replay, Lock& lock) {
    const Graph& graph = *replay.graph;
    s.replay_moment = replay.moment;
    s.busy = true;
    s.owner = std::this_thread::get_id();
    s.executing = stream->device;
    lock.unlock();
    std::optional<Uninterrupted> guard;  // one for all kernels, which are calls of Python; it asks the system several times
    if (!s.null_kernels) guard.emplace(false);
    aclError status = ACL_SUCCESS;
    for (size_t index = 0; index < graph.tasks.size(); ++index) {
        const Task& task = graph.tasks[index];
        if (task.kind == Kind::Wait) continue;
        if (task.kind == Kind::Record || task.kind == Kind::Reset) {
            if (!task.ticket) continue;
            lock.lock();  // other threads may query an event that outlives the replay
            signal(task);
            lock.unlock();
            continue;
        }
        if (s.logging) {
            lock.lock();
            note_ran(stream, task, &graph, replay.value, graph.lane_of[index]);
            lock.unlock();
        }
        status = execute(task, replay.seeds.data());
        if (status != ACL_SUCCESS) break;
    }
    lock.lock();
    s.busy = false;
    for (const Task& task : graph.tasks) count(s, task);
    note_failure(s, stream->device, status);
}

bool ready(const Task& task) {
    if (task.kind == Kind::Collective) return !task.exchange->open;
    if (task.kind == Kind::Wait) return !task.ticket || task.ticket->done;
    if (task.kind != Kind::ValueWait) return true;
    const uint64_t found = *static_cast<const volatile uint64_t*>(task.source);
    switch (task.bytes) {
        case ACL_STREAM_WAIT_VALUE_EQ: return found == task.value;
        case ACL_STREAM_WAIT_VALUE_AND: return (found & task.value) != 0;
        case ACL_STREAM_WAIT_VALUE_NOR: return ~(found | task.value) != 0;
        default: return static_cast<int64_t>(found - task.value) >= 0;
    }
}

bool lane_ready(const Run& run, uint32_t lane) {
    const auto& tasks = run.graph->lanes[lane].tasks;
    if (run.next[lane] >= tasks.size() || run.away[lane]) return false;
    const Task& task = run.graph->tasks[tasks[run.next[lane]]];
    if (task.kind == Kind::Wait && task.edge >= 0) return run.done[static_cast<size_t>(task.edge)];
    return ready(task);
}

// By launch order, not by stream: torch_npu uses its pooled streams in turn, so a repeated program gets other streams.
void sort_by_launch(std::vector<Choice>& found) {
    std::sort(found.begin(), found.end(),
              [](const Choice& a, const Choice& b) { return std::make_pair(a.order, a.lane) < std::make_pair(b.order, b.lane); });
}

// The tasks that can run, and the held collectives whose end the device can wait for.
std::vector<Choice> choices_and_waits(State& s) {
    std::vector<Choice> found = choices(s);
    for (const AwayRef& away : s.deferred)
        if (!away->released) found.push_back(away->place);
    if (found.empty())
        for (const AwayRef& away : s.deferred) found.push_back(away->place);
    sort_by_launch(found);
    return found;
}

// A spoiling task belongs to the task before it on its stream, so it adds no decision and no order to a search.
void finish_head(State& s, Stream* stream) {
    stream->replaying = false;
    do {
        stream->queue.pop_front();
        --s.pending;
        if (!stream->queue.empty() && stream->queue.front().second.kind == Kind::Spoil) execute_spoiling(stream->queue.front().second);
    } while (!stream->queue.empty() && stream->queue.front().second.kind == Kind::Spoil);
    spoil_what_is_free(s);
    s.changed.notify_all();
}

// The same applies in a lane of a replay, which may begin with such tasks.
void spoil_in_lane(Run* run, uint32_t lane) {
    const auto& tasks = run->graph->lanes[lane].tasks;
    for (; run->next[lane] < tasks.size(); ++run->next[lane]) {
        const uint32_t index = tasks[run->next[lane]];
        if (run->graph->tasks[index].kind != Kind::Spoil) return;
        execute_spoiling(run->graph->tasks[index]);
        run->done[index] = true;
        --run->left;
    }
}

void finish_lane_step(State& s, Run* run, uint32_t lane, uint32_t index) {
    ++run->next[lane];
    run->done[index] = true;
    --run->left;
    spoil_in_lane(run, lane);
    if (run->left != 0) return;
    Stream* stream = run->stream;
    for (auto item = s.runs.begin(); item != s.runs.end(); ++item) {
        if (item->get() != run) continue;
        s.runs.erase(item);
        break;
    }
    finish_head(s, stream);
}

// Starts a collective. Its engine ends it, with the lock held.
void send_away(State& s, const Task& task, Choice place, std::function<void()> finish) {
    const auto away = std::make_shared<Away>();
    place.away = away;
    away->place = std::move(place);
    away->finish = std::move(finish);
    away->held = holds_collectives();
    if (away->held) s.held = away;
    ++s.away;
    const int32_t device = task.exchange->communicator->device;
    start_exchange(task.exchange, away, [&s, away, device](aclError status) {
        --s.away;
        note_failure(s, device, status);
        away->ended = true;
        if (away->held && status == ACL_SUCCESS) return;
        forget_held(s, away);
        away->finish();
        away->place.away.reset();
    });
}

void run_lane_step(State& s, const Choice& chosen, Lock& lock) {
    Run* const run = chosen.run;
    const uint32_t lane = chosen.lane;
    const GraphRef graph = run->graph;  // keeps the task alive during its run
    const uint32_t index = graph->lanes[lane].tasks[run->next[lane]];
    note_ran(run->stream, graph->tasks[index], graph.get(), run->replay, lane);
    if (graph->tasks[index].kind == Kind::Collective) {
        run->away[lane] = true;
        send_away(s, graph->tasks[index], chosen, [&s, run, lane, index] {
            run->away[lane] = false;
            finish_lane_step(s, run, lane, index);
        });
        return;
    }
    s.replay_moment = run->moment;
    run_task(s, run->stream, graph->tasks[index], run->seeds.data(), lock);
    finish_lane_step(s, run, lane, index);
}

void start_replay(State& s, Stream* stream, Lock& lock) {
    Task replay = stream->queue.front().second;
    const GraphRef graph = replay.graph;
    if ((s.policy == Policy::Fifo && !graph->waits_outside) || graph->tasks.empty()) {
        run_graph_in_order(s, stream, replay, lock);
        finish_head(s, stream);
        return;
    }
    auto run = std::make_unique<Run>();
    run->graph = graph;
    run->next.assign(graph->lanes.size(), 0);
    run->done.assign(graph->tasks.size(), false);
    run->away.assign(graph->lanes.size(), false);
    run->left = graph->tasks.size();
    run->stream = stream;
    run->seeds = std::move(replay.seeds);
    run->replay = replay.value;
    run->moment = replay.moment;
    // A replay writes its memory before it reads it. The contents from an earlier replay must not hide a missing write.
    for (const Task& task : graph->tasks)
        if (task.kind == Kind::Spoil && (task.value & kSpoilAtStart) != 0) spoil(task.destination, task.bytes, task.value & kPoison);
    for (uint32_t lane = 0; lane < run->next.size(); ++lane) spoil_in_lane(run.get(), lane);
    if (run->left == 0) {
        finish_head(s, stream);
        return;
    }
    stream->replaying = true;
    s.runs.push_back(std::move(run));
}

}  // namespace

std::vector<Choice> choices(State& s) {
    std::vector<Choice> found;
    for (auto& stream : s.streams) {
        if (stream->queue.empty() || stream->replaying || stream->away || !ready(stream->queue.front().second)) continue;
        found.push_back({stream->queue.front().first, stream.get(), nullptr, 0, nullptr});
    }
    for (auto& run : s.runs) {
        for (uint32_t lane = 0; lane < run->next.size(); ++lane)
            if (lane_ready(*run, lane)) found.push_back({run->stream->queue.front().first, run->stream, run.get(), lane, nullptr});
    }
    sort_by_launch(found);
    return found;
}

// Runs one ready task. False when nothing is ready.
bool step(Lock& lock, Stream* wanted) {
    State& s = state();
    if (s.held) return resume_held(s);
    const std::vector<Choice> found = choices_and_waits(s);
    if (found.empty()) return false;
    const Choice chosen = pick(found, wanted);
    goes_on();
    if (chosen.away) {
        s.held = chosen.away;
        s.deferred.erase(std::find(s.deferred.begin(), s.deferred.end(), chosen.away));
        s.changed.notify_all();
    } else if (chosen.run != nullptr) {
        run_lane_step(s, chosen, lock);
    } else if (chosen.stream->queue.front().second.kind == Kind::Replay) {
        start_replay(s, chosen.stream, lock);
    } else {
        const Task task = chosen.stream->queue.front().second;
        note_ran(chosen.stream, task, nullptr, 0, 0);
        if (task.kind == Kind::Collective) {
            Stream* stream = chosen.stream;
            stream->away = true;
            send_away(s, task, chosen, [&s, stream] {
                stream->away = false;
                finish_head(s, stream);
            });
            return true;
        }
        run_task(s, chosen.stream, task, nullptr, lock);
        if (task.kind == Kind::Kernel) s.released.push_back(task.kernel);
        finish_head(s, chosen.stream);
    }
    return true;
}

// Waits a moment for another thread, which executes a task or a collective.
void wait_for_change(Lock& lock) {
    State& s = state();
    const size_t pending = s.pending;
    const AwayRef held = s.held;
    lock.unlock();
    {
        // This scope releases the GIL before it takes the lock, and takes the GIL back after it releases the lock.
        WithoutGil guard;
        Lock waiting(s.mutex);
        s.changed.wait_for(waiting, std::chrono::milliseconds(10), [&] { return !s.busy && (s.away == 0 || s.pending != pending || s.held != held || (held && held->ended)); });
    }
    lock.lock();
}

namespace {

bool queues_collective(const State& s) {
    const auto has = [](const Task& task) { return task.kind == Kind::Collective; };
    for (const auto& stream : s.streams)
        for (const auto& [order, task] : stream->queue)
            if (has(task) || (task.graph && std::any_of(task.graph->tasks.begin(), task.graph->tasks.end(), has))) return true;
    return false;
}

}  // namespace

bool is_blocked(Lock&) {
    State& s = state();
    const bool meets = !s.meeting.empty();
    if (s.busy || s.draining || (s.away == 0 && !meets) || (s.waiting.empty() && !meets)) return false;
    if (!engines_wait() || (s.held && can_end(s.held)) || std::any_of(s.deferred.begin(), s.deferred.end(), can_end)) return false;
    const auto waits = [&](const auto& thread) { return s.waiting.count(thread) != 0 || s.meeting.count(thread) != 0; };
    if (!std::all_of(s.launchers.begin(), s.launchers.end(), waits) || some_wait_is_over()) return false;
    // What is queued goes on while a thread meets other ranks (standstill.cpp), and only a collective in it can help one of them.
    return choices(s).empty() || (s.waiting.empty() && !queues_collective(s));
}

bool everybody_waits() {
    const State& s = state();
    return std::all_of(s.launchers.begin(), s.launchers.end(), [&](const auto& thread) { return s.waiting.count(thread) != 0; });
}

// The thread may not have noticed yet.
bool some_wait_is_over() {
    const State& s = state();
    return std::any_of(s.waiting.begin(), s.waiting.end(), [](const auto& item) { return (*item.second)(); });
}

void wait_for_drain(Lock& lock) {
    State& s = state();
    while (s.draining && !(s.busy && s.owner == std::this_thread::get_id())) wait_for_change(lock);
}

namespace {

// Says that this thread waits for the device, as long as it lives. With the lock held at both ends.
class Waiting {
  public:
    Waiting(State& s, const std::function<bool()>& finished) : s_(s), before_(std::exchange(s.waiting[std::this_thread::get_id()], &finished)) {
        ++s.calls;
        goes_on();
    }
    ~Waiting() {
        ++s_.calls;
        if (before_ == nullptr) s_.waiting.erase(std::this_thread::get_id());
        else s_.waiting[std::this_thread::get_id()] = before_;
        goes_on();
        deliver_interrupts();
    }

  private:
    State& s_;
    const std::function<bool()>* before_;  // of a wait around this one
};

}  // namespace

// Runs tasks, or waits for a thread that runs them, until `finished()`.
aclError wait_until(Lock& lock, const std::function<bool()>& finished, Stream* wanted) {
    State& s = state();
    wait_for_drain(lock);
    const Waiting waiting(s, finished);
    while (!finished()) {
        if (!s.busy) {
            if (step(lock, wanted)) continue;
            if (s.away != 0) {
                wait_for_change(lock);
                continue;
            }
            return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
                        "deadlock: the host waits for a stream whose next task waits for what cannot come: nothing queued signals it, "
                        "or streams wait for each other",
                        "record the event, or write the value, before synchronising; of two streams that wait for each other, let one "
                        "record before it waits");
        }
        if (s.owner == std::this_thread::get_id())
            return fail(ACL_ERROR_RT_TASK_TYPE_NOT_SUPPORT, "a kernel or host function may not wait for the device that runs it",
                                                            "synchronise from the program, after the launch");
        wait_for_change(lock);
    }
    return ACL_SUCCESS;
}

aclError wait_for_stream(Lock& lock, Stream* stream) {
    const aclError status = wait_until(lock, [&] { return stream->queue.empty(); }, stream);
    note_stream_finished(stream);
    return status;
}

aclError wait_for_device(Lock& lock, int32_t device) {
    State& s = state();
    note_device_finished();
    if (s.pending == 0) return ACL_SUCCESS;
    const auto idle = [&] {
        for (const auto& stream : s.streams)
            if (stream->device == device && !stream->queue.empty()) return false;
        return true;
    };
    return wait_until(lock, idle, nullptr);
}

aclError wait_for_ticket(Lock& lock, const TicketRef& ticket) {
    if (!ticket) return ACL_SUCCESS;
    note_ticket_finished(ticket);
    return wait_until(lock, [&] { return ticket->done; }, nullptr);
}

aclError take_failure(int32_t device, Lock&) {
    auto& failures = state().failures;
    const auto found = failures.find(device);
    if (found == failures.end() || found->second.code == ACL_SUCCESS) return ACL_SUCCESS;
    auto [code, message, advice, stopped] = std::move(found->second);
    failures.erase(found);
    if (message.empty()) message = "an asynchronous task failed";
    if (code == ACL_ERROR_RT_PARAM_INVALID) return fail(code, message, "call the same collectives with the same sizes in the same order on every rank");
    if (message.find("wait for each other") != std::string::npos) return fail(code, message, "call collectives, sends and receives in orders that fit on all ranks");
    if (message.find("was destroyed") != std::string::npos)
        return fail(code, message, "destroy a group when its work has ended, and capture again the graphs that use it");
    if (code == ACL_ERROR_RT_SUSPECT_REMOTE_ERROR || code == ACL_ERROR_RT_FFTS_PLUS_TIMEOUT)
        return fail(code, message, "look at the output of that rank first");
    if (code == ACL_ERROR_RT_MODEL_EXECUTE) return fail(code, message, kKeepAllocated);
    return fail(code, message, advice.empty() ? "mend what that line launches" : advice);
}

Stream* resolve(aclrtStream handle) {
    if (handle != nullptr) return static_cast<Stream*>(handle);
    State& s = state();
    Stream*& found = s.default_stream[current_device()];
    if (found == nullptr) {
        auto stream = std::make_unique<Stream>();
        stream->id = s.next_stream++;
        stream->device = current_device();
        found = stream.get();
        s.streams.push_back(std::move(stream));
    }
    return found;
}

// The fast path of a replay without earlier work: no queue, no copy of a task. False if there is earlier work.
bool replay_at_once(Stream* stream, const Task& replay, Lock& lock) {
    State& s = state();
    const bool plain = s.policy == Policy::Fifo && !s.busy && s.pending == 0 && !s.tracing;
    if (!plain || stream->capture || stream->updating || replay.graph->waits_outside) return false;
    run_graph_in_order(s, stream, replay, lock);  // the task keeps the graph alive if a kernel destroys its handle
    while (s.pending != 0 && !s.busy && step(lock, nullptr)) {
    }
    s.changed.notify_all();
    deliver_interrupts();
    return true;
}

namespace {

// A thread that has launched work.
class Launcher {
  public:
    // With the lock held.
    void enter() {
        if (known_) return;
        known_ = true;
        char name[16] = "";
        pthread_getname_np(pthread_self(), name, sizeof name);
        if (strncmp(name, "pt_autograd", 11) == 0) return;
        state().launchers.insert(std::this_thread::get_id());
        counts_ = true;
    }
    ~Launcher() {
        if (!counts_) return;
        Lock lock(state().mutex);
        state().launchers.erase(std::this_thread::get_id());
    }

  private:
    bool known_ = false, counts_ = false;
};

thread_local Launcher launcher;

}  // namespace

void launches_here() { launcher.enter(); }

// Queues a task, or records it in its stream's capture, and then runs the work that the policy allows at a launch.
aclError submit(Stream* stream, Task task, Lock& lock) {
    if (stream->capture) return append(stream, std::move(task), lock);
    if (stream->updating) {
        stream->updating->replacements.push_back(std::move(task));
        return ACL_SUCCESS;
    }
    State& s = state();
    launcher.enter();
    wait_for_drain(lock);
    ++s.calls;
    goes_on();
    note_launch(stream, task);
    stream->queue.emplace_back(s.launched++, std::move(task));
    ++s.pending;
    run_what_is_due(lock);
    return ACL_SUCCESS;
}

// Runs the work that the policy allows at a launch.
void run_what_is_due(Lock& lock) {
    State& s = state();
    if (s.busy) return;  // the executing thread continues with the queue
    if (s.policy == Policy::Fifo) {
        while (!s.busy && step(lock, nullptr)) {
        }
    } else {
        // A held collective ends at some time, which must decide nothing here: the device waits until the program does.
        for (uint64_t steps = steps_at_launch(); steps > 0 && !s.busy && !s.held && step(lock, nullptr); --steps) {
        }
    }
    deliver_interrupts();
}

// Spoils freed memory. Earlier launches on any stream may still use it, so they run first.
void spoil_when_idle(char* address, Freed freed) {
    State& s = state();
    s.freed[address] = freed;
    spoil_what_is_free(s);
}

// Spoils newly allocated memory: immediately if no queued work can use it, else after the present work of its stream. A record
// at the end does not use the memory, and work that waits for the record may write there, so the spoiling comes before the record.
void submit_spoiling(Stream* stream, Task task, Lock& lock) {
    State& s = state();
    const bool used = forget_freed(s, static_cast<char*>(task.destination), task.bytes);
    if (stream->capture) {
        append(stream, std::move(task), lock);
        return;
    }
    if (stream->updating) return;  // an update launches nothing by itself
    auto place = stream->queue.end();
    while (place != stream->queue.begin() && std::prev(place)->second.kind == Kind::Record) --place;
    if (!used || place == stream->queue.begin()) {
        execute_spoiling(task);
    } else {
        stream->queue.emplace(place, s.launched++, std::move(task));
        ++s.pending;
    }
}

}  // namespace emu
