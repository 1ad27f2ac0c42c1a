// Task groups: tasks of a captured graph whose arguments may be replaced between replays.
//
// During an update of a stream, launches on it do not run: they replace the group's tasks, one by one. The replacement itself
// is a task of that stream, so events order it like other tasks. An update that overtakes a queued replay changes that
// replay, as on hardware.
#include "emulator.h"

using namespace emu;

namespace emu {

void replace_tasks(const Task& update) {
    State& s = state();
    const GraphRef graph = update.group->graph.lock();
    if (!graph) return;
    for (size_t place = 0; place < update.replacements.size(); ++place) {
        Task& old = graph->tasks[update.group->tasks[place]];
        if (old.kind == Kind::Kernel) s.released.push_back(old.kernel);
        old = update.replacements[place];
    }
}

}  // namespace emu

EMU_API aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
    State& s = state();
    Lock lock(s.mutex);
    Stream* stream = resolve(handle);
    if (!stream->capture) return fail(answered("group-outside", ACL_ERROR_RT_STREAM_NOT_CAPTURED), "a task group can only begin on a stream that is being captured", "begin it after the capture");
    if (stream->group) return fail(ACL_ERROR_RT_PARAM_INVALID, "a task group has begun on this stream already", "end it first: task groups do not nest");
    stream->group = std::make_shared<Group>();
    stream->group->graph = stream->capture;
    return ACL_SUCCESS;
}

EMU_API aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp* group) {
    State& s = state();
    Lock lock(s.mutex);
    Stream* stream = resolve(handle);
    if (!stream->group) return fail(ACL_ERROR_RT_PARAM_INVALID, "no task group has begun on this stream", "begin one before ending it");
    stream->capture->groups.push_back(stream->group);  // the handle is valid as long as its graph
    *group = stream->group.get();
    s.groups[stream->group.get()] = stream->group;
    stream->group.reset();
    return ACL_SUCCESS;
}

EMU_API aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group) {
    State& s = state();
    Lock lock(s.mutex);
    Stream* stream = resolve(handle);
    const auto found = s.groups.find(group);
    const GroupRef known = found == s.groups.end() ? nullptr : found->second.lock();
    if (!known) return fail(ACL_ERROR_RT_PARAM_INVALID, "this task group does not exist, or its graph was destroyed", "update groups of graphs that are kept");
    if (stream->capture) return refuse_in_capture("update", "the update of a task group on the captured stream (aclmdlRICaptureTaskUpdateBegin)");
    if (stream->updating) return fail(ACL_ERROR_RT_PARAM_INVALID, "this stream is in an update already", "end that update first");
    stream->updating = std::make_shared<Task>();
    stream->updating->kind = Kind::Update;
    stream->updating->group = known;
    return ACL_SUCCESS;
}

EMU_API aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
    State& s = state();
    Lock lock(s.mutex);
    Stream* stream = resolve(handle);
    if (!stream->updating) return fail(ACL_ERROR_RT_PARAM_INVALID, "no update has begun on this stream", "begin one before ending it");
    Task update = std::move(*stream->updating);
    stream->updating.reset();
    const size_t wanted = update.group->tasks.size(), given = update.replacements.size();
    if (wanted != given)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "the task group holds " + std::to_string(wanted) + " tasks and the update launched " +
                                                    std::to_string(given) + "", "an update must launch the same operators again");
    return submit(stream, std::move(update), lock);
}
