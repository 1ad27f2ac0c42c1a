// The limited resources of a device: streams and events. A captured graph owns one stream for each of its lanes as long as it
// lives, so many captures exhaust a device.
#include "emulator.h"

using namespace emu;

namespace emu {

uint64_t streams_in_use() {
    State& s = state();
    uint64_t used = s.streams.size();
    for (const auto& [handle, graph] : s.graphs) used += graph->lanes.size();
    for (const Graph* graph : s.capturing) used += graph->lanes.size();
    return used;
}

// Success, or 207008 with the users of the streams.
aclError no_stream_left(const char* wanted) {
    State& s = state();
    const uint64_t used = streams_in_use();
    if (used < s.stream_budget) return ACL_SUCCESS;
    return fail(ACL_ERROR_RT_NO_STREAM_RESOURCE,
                std::string(wanted) + ": all " + std::to_string(s.stream_budget) + " streams of the device are in use, " +
                    std::to_string(used - s.streams.size()) + " of them by " + std::to_string(s.graphs.size()) +
                    " captured graphs", "destroy graphs, capture fewer sizes, or use fewer side streams in each (NPU_EMULATOR_STREAMS)");
}

// Stores the costs of a graph at the end of its capture.
void note_cost(const Graph& graph) {
    Cost cost;
    cost.graph = graph.id;
    cost.streams = graph.lanes.size();
    cost.memory = graph.memory;
    for (const Task& task : graph.tasks) {
        cost.kernels += task.kind == Kind::Kernel;
        cost.events += task.kind == Kind::Record;
        cost.others += task.kind != Kind::Kernel && task.kind != Kind::Spoil;  // the emulator's own work
    }
    state().costs.push_back(cost);
}

// Device memory that a thread allocates during its capture belongs to the graph: torch_npu's allocator gives graphs their own
// pools.
void charge_capture(uint64_t bytes) {
    State& s = state();
    Lock lock(s.mutex);
    for (Graph* graph : s.capturing)
        if (graph->thread == std::this_thread::get_id()) graph->memory += bytes;
}

}  // namespace emu

EMU_API void emu_set_budgets(uint64_t streams, uint64_t events) {
    State& s = state();
    Lock lock(s.mutex);
    s.stream_budget = streams;
    s.event_budget = events;
}

// {streams in use, all streams, events in use, all events, captures so far}
EMU_API void emu_resources(uint64_t* out) {
    State& s = state();
    Lock lock(s.mutex);
    out[0] = streams_in_use();
    out[1] = s.stream_budget;
    out[2] = s.events;
    out[3] = s.event_budget;
    out[4] = s.costs.size();
}

// For up to `capacity` captures, oldest first: the seven numbers of Cost. Returns the number of captures written.
EMU_API uint64_t emu_costs(Cost* out, uint64_t capacity) {
    static_assert(sizeof(Cost) == 7 * sizeof(uint64_t), "Python reads costs as seven numbers");
    State& s = state();
    Lock lock(s.mutex);
    std::set<uint64_t> alive;
    for (const auto& [handle, graph] : s.graphs) alive.insert(graph->id);
    const uint64_t count = std::min<uint64_t>(capacity, s.costs.size());
    for (uint64_t place = 0; place < count; ++place) {
        out[place] = s.costs[place];
        out[place].alive = alive.count(out[place].graph);
    }
    return count;
}
