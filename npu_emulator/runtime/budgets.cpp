// What a device has a limited number of: streams and events. A captured graph holds one stream for each of its lanes for as
// long as it lives, which is what exhausts a device after many captures.
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

// Success, or 207008 with what the streams went into.
aclError no_stream_left(const char* wanted) {
    State& s = state();
    const uint64_t used = streams_in_use();
    if (used < s.stream_budget) return ACL_SUCCESS;
    return fail(ACL_ERROR_RT_NO_STREAM_RESOURCE,
                std::string(wanted) + ": all " + std::to_string(s.stream_budget) + " streams of the device are in use, " +
                    std::to_string(used - s.streams.size()) + " of them by " + std::to_string(s.graphs.size()) +
                    " captured graphs; destroy graphs, capture fewer sizes, or use fewer side streams in each (NPU_EMULATOR_STREAMS)");
}

}  // namespace emu

EMU_API void emu_set_budgets(uint64_t streams, uint64_t events) {
    State& s = state();
    Lock lock(s.mutex);
    s.stream_budget = streams;
    s.event_budget = events;
}

// {streams in use, streams there are, events in use, events there are, captured graphs}
EMU_API void emu_resources(uint64_t* out) {
    State& s = state();
    Lock lock(s.mutex);
    out[0] = streams_in_use();
    out[1] = s.stream_budget;
    out[2] = s.events;
    out[3] = s.event_budget;
    out[4] = s.graphs.size();
}

// For up to `capacity` captured graphs, oldest first: {id, streams, kernels, other tasks}. Returns how many there are.
EMU_API uint64_t emu_graphs(uint64_t* out, uint64_t capacity) {
    State& s = state();
    Lock lock(s.mutex);
    std::map<uint32_t, const Graph*> by_age;
    for (const auto& [handle, graph] : s.graphs) by_age[graph->id] = graph.get();
    uint64_t count = 0;
    for (const auto& [id, graph] : by_age) {
        if (count == capacity) break;
        uint64_t kernels = 0;
        for (const Task& task : graph->tasks) kernels += task.kind == Kind::Kernel;
        uint64_t* row = out + 4 * count++;
        row[0] = id;
        row[1] = graph->lanes.size();
        row[2] = kernels;
        row[3] = graph->tasks.size() - kernels;
    }
    return by_age.size();
}
