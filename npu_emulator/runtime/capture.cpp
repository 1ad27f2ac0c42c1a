// Stream capture: from aclmdlRICaptureBegin to a graph that aclmdlRIExecuteAsync replays.
#include <cstdio>

#include "emulator.h"

namespace emu {

namespace {

thread_local aclmdlRICaptureMode thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

void leave_capture(Graph& graph) {
    for (Stream* stream : graph.streams) {
        stream->capture.reset();
        stream->group.reset();
    }
    state().capturing.erase(&graph);
}

void see(Lane& lane, uint32_t other, int64_t reached) {
    const auto [found, inserted] = lane.seen.emplace(other, reached);
    if (!inserted && found->second < reached) found->second = reached;
}

// The lane must end in work that the origin has waited for; a trailing record needs no wait, nor does spoiling, which is our own.
bool joined(const Graph& graph, uint32_t lane) {
    const Lane& side = graph.lanes[lane];
    int64_t last = -1;
    for (const uint32_t index : side.tasks)
        if (graph.tasks[index].kind != Kind::Record && graph.tasks[index].kind != Kind::Spoil) last = index;
    const auto& seen = graph.lanes[graph.origin].seen;
    const auto found = seen.find(lane);
    return last < 0 || (found != seen.end() && found->second >= last);
}

}  // namespace

Graph::~Graph() {
    // Python drops these kernels later, because a destructor must not call into Python.
    State& s = state();
    for (const Task& task : tasks)
        if (task.kind == Kind::Kernel) s.released.push_back(task.kernel);
}

bool capture_forbids_here(Lock&) {
    if (thread_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return false;
    for (const Graph* graph : state().capturing) {
        if (graph->mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL) return true;
        if (graph->mode == ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL && graph->thread == std::this_thread::get_id()) return true;
    }
    return false;
}

bool captures_on(Lock&, int32_t device) {
    const auto& capturing = state().capturing;
    return std::any_of(capturing.begin(), capturing.end(), [&](const Graph* graph) { return graph->device == device; });
}

bool only_others_capture(Lock&) {
    const auto& capturing = state().capturing;
    return std::none_of(capturing.begin(), capturing.end(), [](const Graph* graph) { return graph->thread == std::this_thread::get_id(); });
}

aclError refuse_in_capture(const char* decision, const char* operation, const char* advice) {
    return fail(answered(decision, ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT), std::string(operation) + " is not permitted while a stream is being captured", advice);
}

// A replay touches no other bytes than the capture's tasks do, so it spoils no others: memory that the capture only allocated
// may meanwhile hold another graph's results.
void note_use(Graph& graph, const void* address, size_t bytes) {
    char* start = static_cast<char*>(const_cast<void*>(address));
    char* const end = start + bytes;
    auto next = graph.allocated.upper_bound(start);
    if (next != graph.allocated.begin() && std::prev(next)->first + std::prev(next)->second.bytes > start) --next;
    for (; start < end; ++next) {
        const bool found = next != graph.allocated.end() && next->first < end;
        char* const other = found ? std::max(start, next->first) : end;
        if (start < other) {
            char*& reached = graph.inherited[start];
            reached = std::max(reached, other);
        }
        if (!found) return;
        char* const stop = std::min(end, next->first + next->second.bytes);
        Task& spoiling = graph.tasks[next->second.task];
        char* const first = static_cast<char*>(spoiling.destination);
        char* const last = std::max(first + spoiling.bytes, stop);
        spoiling.destination = spoiling.bytes == 0 ? other : std::min(first, other);
        spoiling.bytes = static_cast<size_t>((spoiling.bytes == 0 ? stop : last) - static_cast<char*>(spoiling.destination));
        start = stop;
    }
}

namespace {

void allocate_in(Graph& graph, Task& spoiling, uint32_t index) {
    char* const start = static_cast<char*>(spoiling.destination);
    char* const end = start + spoiling.bytes;
    auto item = graph.allocated.lower_bound(start);
    if (item != graph.allocated.begin() && std::prev(item)->first + std::prev(item)->second.bytes > start) --item;
    while (item != graph.allocated.end() && item->first < end) item = graph.allocated.erase(item);
    graph.allocated[start] = {spoiling.bytes, index};
    // Memory that an earlier task of the graph used may bring values into a replay.
    const bool brings = std::any_of(graph.inherited.begin(), graph.inherited.lower_bound(end), [&](const auto& range) { return range.second > start; });
    if (!brings) spoiling.value |= kSpoilAtStart;
    spoiling.bytes = 0;  // until a task uses it
}

// The memory that other graphs use: from its first byte to one past its last. Of one that was
// captured before the check nothing is known.
std::map<char*, char*> used_by_others(const Graph& graph) {
    std::map<char*, char*> used;
    const auto note = [&](char* first, char* end) {
        if (first < end) used[first] = std::max(used[first], end);
    };
    for (const auto& [handle, other] : state().graphs) {
        if (other.get() == &graph) continue;
        for (const auto& [first, end] : other->inherited) note(first, end);
        for (const Task& task : other->tasks)
            if (task.kind == Kind::Spoil) note(static_cast<char*>(task.destination), static_cast<char*>(task.destination) + task.bytes);
    }
    return used;
}

// Nothing of the graph has run yet, so its results are unwritten until its first replay. Results of another graph may lie in the
// same memory of a pool, and work that is queued or was launched during the capture may have written there: such bytes stay.
void spoil_results(const Graph& graph) {
    State& s = state();
    if (s.pending != 0 || s.launched != graph.launched_before) return;
    const std::map<char*, char*> used = used_by_others(graph);
    for (const Task& task : graph.tasks) {
        if (task.kind != Kind::Spoil || (task.value & kSpoilAtStart) == 0) continue;
        char* first = static_cast<char*>(task.destination);
        char* const end = first + task.bytes;
        for (const auto& [from, to] : used) {
            if (first < std::min(from, end)) spoil(first, static_cast<size_t>(std::min(from, end) - first), task.value);
            first = std::max(first, to);
        }
        if (first < end) spoil(first, static_cast<size_t>(end - first), task.value);
    }
}

}  // namespace

aclError append(Stream* stream, Task task, Lock&) {
    Graph& graph = *stream->capture;
    if (task.kind == Kind::Replay) return refuse_in_capture("replay", "the replay of a graph (aclmdlRIExecuteAsync)");
    const auto index = static_cast<uint32_t>(graph.tasks.size());
    Lane& lane = graph.lanes[stream->lane];
    if (task.kind == Kind::Wait && task.edge >= 0) {
        const auto source = static_cast<size_t>(task.edge);
        const uint32_t from = graph.lane_of[source];
        for (const auto& [other, reached] : graph.seen_at_record[task.edge]) see(lane, other, reached);
        see(lane, from, task.edge);
    }
    if (task.kind == Kind::Record) graph.seen_at_record[index] = lane.seen;
    note_captured(graph, stream->lane, index, task);
    if ((task.kind == Kind::Wait && task.edge < 0) || task.kind == Kind::ValueWait || task.kind == Kind::Collective) graph.waits_outside = true;
    const bool replaceable = task.kind != Kind::Record && task.kind != Kind::Wait && task.kind != Kind::Spoil;
    if (stream->group && replaceable) stream->group->tasks.push_back(index);
    auto place = lane.tasks.end();
    if (task.kind == Kind::Spoil) {  // before the records at the end: as `submit_spoiling`
        while (place != lane.tasks.begin() && graph.tasks[*std::prev(place)].kind == Kind::Record) --place;
        allocate_in(graph, task, index);
    } else if (task.kind == Kind::Copy || task.kind == Kind::Fill) {
        if (task.source != nullptr) note_use(graph, task.source, task.bytes);
        note_use(graph, task.destination, task.bytes);
    } else if (task.kind == Kind::Collective) {
        for (const Note& range : ranges_of(*task.exchange)) note_use(graph, reinterpret_cast<void*>(range.first), range.third);
    }
    lane.tasks.insert(place, index);
    graph.tasks.push_back(std::move(task));
    graph.lane_of.push_back(stream->lane);
    return ACL_SUCCESS;
}

}  // namespace emu

using namespace emu;

EMU_API aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
    State& s = state();
    Lock lock(s.mutex);
    Stream* stream = resolve(handle);
    if (handle == nullptr || stream == s.default_stream[stream->device])
        return fail(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT, "the default stream cannot be captured", "capture on a stream of your own");
    if (stream->capture) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "this stream is being captured already", "end that capture first, or begin this one on another stream");
    if (const aclError none = no_stream_left("aclmdlRICaptureBegin")) return none;
    auto graph = std::make_shared<Graph>();
    graph->id = ++s.next_graph;
    graph->device = stream->device;
    graph->mode = mode;
    graph->thread = std::this_thread::get_id();
    graph->launched_before = s.launched;
    graph->lanes.emplace_back();
    graph->streams.push_back(stream);
    stream->capture = graph;
    stream->lane = 0;
    s.capturing.insert(graph.get());
    return ACL_SUCCESS;
}

EMU_API aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* model) {
    State& s = state();
    Lock lock(s.mutex);
    Stream* stream = resolve(handle);
    *model = nullptr;
    if (!stream->capture) return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "this stream is not being captured", "begin a capture on it first");
    const GraphRef graph = stream->capture;
    if (graph->streams[graph->origin] != stream)
        return fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture did not begin on this stream", "end it on the stream that began it");
    if (graph->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED && graph->thread != std::this_thread::get_id())
        return fail(ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD, "the capture did not begin on this thread",
                    "end it on the thread that began it, or capture in mode relaxed");
    if (graph->generators != 0) {
        // Only torch_npu knows each generator's last offset, and only during a capture.
        lock.unlock();  // Python may need another thread's GIL
        {
            const Uninterrupted guard;
            python_capture_ends.load()(graph->id);
        }
        lock.lock();
    }
    leave_capture(*graph);
    if (graph->status != ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE)
        return fail(ACL_ERROR_RT_MODEL_CAPTURED, "an earlier error invalidated this capture", "mend that one and capture again");
    graph->status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    for (uint32_t lane = 0; lane < graph->lanes.size(); ++lane) {
        if (lane == graph->origin || joined(*graph, lane)) continue;
        if (const aclError unjoined = fail(answered("unjoined", ACL_ERROR_RT_STREAM_UNJOINED),
                    "stream " + std::to_string(graph->streams[lane]->id) + " was drawn into the capture and never joined",
                    "before the capture ends, record an event on it and let the capturing stream wait for that event"))
            return unjoined;
    }
    spoil_results(*graph);
    *model = graph.get();
    s.graphs[graph.get()] = graph;
    note_cost(*graph);
    return ACL_SUCCESS;
}

EMU_API aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* model) {
    Lock lock(state().mutex);
    const Stream* stream = resolve(handle);
    *status = stream->capture ? stream->capture->status : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (model != nullptr) *model = stream->capture.get();
    return ACL_SUCCESS;
}

EMU_API aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
    std::swap(thread_mode, *mode);
    return ACL_SUCCESS;
}

EMU_API aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream handle) {
    State& s = state();
    Lock lock(s.mutex);
    const auto found = s.graphs.find(model);
    if (found == s.graphs.end()) return fail(ACL_ERROR_RT_PARAM_INVALID, "this graph does not exist, or was destroyed", "capture it anew, and keep it for as long as it is replayed");
    Stream* stream = resolve(handle);
    Task task;
    task.kind = Kind::Replay;
    task.graph = found->second;
    if (task.graph->generators != 0 && !stream->capture) {
        // The host reserves the numbers now, because a replay's numbers must not depend on its time of execution.
        task.seeds.resize(task.graph->generators);
        lock.unlock();  // Python may need another thread's GIL
        {
            const Uninterrupted guard;
            python_seeds.load()(task.graph->id, task.seeds.data());
        }
        lock.lock();
    }
    if (!stream->capture) task.value = ++task.graph->replays;
    task.moment = s.moment;
    if (replay_at_once(stream, task, lock)) return ACL_SUCCESS;
    const bool is_noted = s.tracing && !stream->capture;
    if (const aclError error = submit(stream, std::move(task), lock)) return error;
    if (is_noted && python_replayed.load() != nullptr) {
        if (lock.owns_lock()) lock.unlock();  // as above
        const Uninterrupted guard;
        python_replayed.load()();
    }
    return ACL_SUCCESS;
}

EMU_API aclError aclmdlRIDestroy(aclmdlRI model) {
    State& s = state();
    Lock lock(s.mutex);
    s.graphs.erase(model);  // a queued replay keeps the graph alive
    return ACL_SUCCESS;
}

EMU_API aclError aclmdlRIGetId(aclmdlRI model, uint32_t* id) {
    *id = static_cast<Graph*>(model)->id;
    return ACL_SUCCESS;
}

// A Chrome trace, for torch_npu and Perfetto: one row for each stream, one unit of time for each task.
EMU_API aclError aclmdlRIDebugJsonPrint(aclmdlRI model, const char* path, uint32_t) {
    static const char* const kNames[] = {"kernel", "copy",        "fill",       "host_call", "record", "wait",
                                         "replay", "value_write", "value_wait", "update",    "reset",  "spoil"};
    State& s = state();
    Lock lock(s.mutex);
    const auto& graph = *static_cast<Graph*>(model);
    FILE* file = fopen(path, "w");
    if (file == nullptr) return fail(ACL_ERROR_RT_FILE_OPEN, std::string("cannot write ") + path, "give a path in a folder that exists and may be written to");
    fprintf(file, "[");
    for (size_t index = 0; index < graph.tasks.size(); ++index) {
        const Task& task = graph.tasks[index];
        if (task.kind == Kind::Spoil) continue;  // the emulator's own work, on no real device
        const char* kind = kNames[static_cast<int>(task.kind)];
        const bool named = task.kind == Kind::Kernel && task.op < s.op_names.size();
        fprintf(file,
                "%s\n  {\"name\": \"%s\", \"ph\": \"X\", \"pid\": \"graph %u (emulated)\", \"tid\": \"stream %u\", \"ts\": %zu, \"dur\": 1, "
                "\"args\": {\"kind\": \"%s\", \"index\": %zu, \"waits_for\": %lld}}",
                index ? "," : "", named ? s.op_names[task.op].c_str() : kind, graph.id, graph.lane_of[index], index, kind, index,
                static_cast<long long>(task.edge));
    }
    fprintf(file, "\n]\n");
    fclose(file);
    return ACL_SUCCESS;
}
EMU_API aclError aclmdlRIDebugPrint(aclmdlRI) { return ACL_SUCCESS; }
