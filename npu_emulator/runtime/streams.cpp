// The C interface of streams and events.
#include <chrono>

#include "emulator.h"

using namespace emu;

namespace {

constexpr uint32_t kMostUrgent = 0, kLeastUrgent = 7;  // CANN's priorities

aclError create_stream(aclrtStream* handle, uint32_t priority) {
    if (priority > kLeastUrgent)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "a stream's priority must lie in 0..7, got " + std::to_string(priority),
                    "choose one in that range (aclrtDeviceGetStreamPriorityRange); 0 is the most urgent");
    State& s = state();
    Lock lock(s.mutex);
    if (const aclError none = no_stream_left("aclrtCreateStream")) return none;
    auto stream = std::make_unique<Stream>();
    stream->id = s.next_stream++;
    stream->device = current_device();
    stream->priority = priority;
    *handle = stream.get();
    s.streams.push_back(std::move(stream));
    return ACL_SUCCESS;
}

aclError destroy_stream(aclrtStream handle) {
    State& s = state();
    Lock lock(s.mutex);
    Stream* stream = static_cast<Stream*>(handle);
    const aclError status = wait_for_stream(lock, stream);
    for (auto item = s.streams.begin(); item != s.streams.end(); ++item) {
        if (item->get() != stream) continue;
        s.streams.erase(item);
        break;
    }
    return status;
}

// An external event is a flag: a record sets it, a reset clears it, and a wait reads it at run time, inside a graph or
// outside. So it orders a graph with other work at each replay. Any other event is a new ticket at each record.
bool is_external(const Event* event) { return (event->flags & ACL_EVENT_EXTERNAL) != 0; }

TicketRef new_ticket() {
    auto ticket = std::make_shared<Ticket>();
    ticket->id = state().next_ticket++;
    return ticket;
}

aclError create_event(aclrtEvent* handle, uint32_t flags) {
    State& s = state();
    Lock lock(s.mutex);
    if (s.events >= s.event_budget)
        return fail(ACL_ERROR_RT_NO_EVENT_RESOURCE, "all " + std::to_string(s.event_budget) +
                                                        " events of the device are in use", "keep and reuse events (NPU_EMULATOR_EVENTS)");
    ++s.events;
    auto* event = new Event;
    event->flags = flags;
    if (is_external(event)) {
        event->ticket = new_ticket();
        event->ticket->external = true;
    }
    *handle = event;
    return ACL_SUCCESS;
}

// Reports the error of an asynchronous task, if there is one and the wait itself succeeded.
aclError waited(aclError status, int32_t device, Lock& lock) { return status == ACL_SUCCESS ? take_failure(device, lock) : status; }

// A program that asks again and again waits as well (standstill.cpp).
bool is_launcher(const State& s) { return s.launchers.count(std::this_thread::get_id()) != 0; }
void note_query(State& s) {
    if (is_launcher(s)) ++s.queries;
}

bool is_being_captured(const Event* event) {
    const GraphRef graph = event->captured_in.lock();
    return graph && state().capturing.count(graph.get()) != 0;
}

aclError query_of_captured_event() {
    return fail(answered("query-event", ACL_ERROR_RT_EVENT_CAPTURED), "the query of an event that was recorded in a capture under way has no answer: its record runs at a replay",
                                             "query it after the capture, or record it outside");
}

}  // namespace

EMU_API aclError aclrtCreateStream(aclrtStream* stream) { return create_stream(stream, 0); }
EMU_API aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t priority, uint32_t) {
    return create_stream(stream, priority);
}
EMU_API aclError aclrtStreamGetPriority(aclrtStream stream, uint32_t* priority) {
    Lock lock(state().mutex);
    *priority = resolve(stream)->priority;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtDeviceGetStreamPriorityRange(int32_t* least, int32_t* greatest) {
    *least = kLeastUrgent;
    *greatest = kMostUrgent;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtDestroyStream(aclrtStream stream) { return destroy_stream(stream); }
EMU_API aclError aclrtDestroyStreamForce(aclrtStream stream) { return destroy_stream(stream); }
EMU_API aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
    Lock lock(state().mutex);
    *id = resolve(stream)->id;
    return ACL_SUCCESS;
}
// A capture forbids, in every mode, a wait for captured work, because that will not run before a replay. A wait for other
// streams and events is permitted: torch_npu's generators wait for the default stream at their first captured draw.
EMU_API aclError aclrtSynchronizeStream(aclrtStream stream) {
    Lock lock(state().mutex);
    Stream* wanted = resolve(stream);
    if (wanted->capture) return refuse_in_capture("stream", "waiting for the captured stream (aclrtSynchronizeStream)");
    return waited(wait_for_stream(lock, wanted), wanted->device, lock);
}
EMU_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) { return aclrtSynchronizeStream(stream); }
EMU_API aclError aclrtSynchronizeDevice(void) {
    Lock lock(state().mutex);
    if (captures_on(lock, current_device()))
        if (const aclError refused = refuse_in_capture("device", "waiting for the device (aclrtSynchronizeDevice)")) return refused;
    return waited(wait_for_device(lock, current_device()), current_device(), lock);
}
EMU_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }
EMU_API aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
    State& s = state();
    Lock lock(s.mutex);
    Stream* stream = resolve(handle);
    *status = ACL_STREAM_STATUS_COMPLETE;
    if (stream->capture)
        return fail(answered("query-stream", ACL_ERROR_RT_STREAM_CAPTURED), "the query of a stream that is being captured has no answer: nothing runs on it before a replay",
                                                  "query it after the capture");
    wait_for_drain(lock);
    note_query(s);
    if (!stream->queue.empty() && !s.busy) step(lock, stream);  // so that a polling loop ends
    if (stream->queue.empty()) note_stream_finished(stream);
    *status = stream->queue.empty() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return ACL_SUCCESS; }
EMU_API aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
EMU_API aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
EMU_API aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* flag) {
    *flag = 0;
    return ACL_SUCCESS;
}

EMU_API aclError aclrtCreateEvent(aclrtEvent* event) { return create_event(event, ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE); }
EMU_API aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flags) { return create_event(event, flags); }
EMU_API aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flags) { return create_event(event, flags); }
EMU_API aclError aclrtDestroyEvent(aclrtEvent event) {
    Lock lock(state().mutex);
    --state().events;
    delete static_cast<Event*>(event);  // queued tasks refer to the ticket, not the event
    return ACL_SUCCESS;
}
// Only an external event has a flag to reset: the ticket of any other event belongs to one record.
EMU_API aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream) {
    Lock lock(state().mutex);
    auto* event = static_cast<Event*>(handle);
    if (!is_external(event)) return ACL_SUCCESS;
    Task task;
    task.kind = Kind::Reset;
    task.ticket = event->ticket;
    return submit(resolve(stream), std::move(task), lock);
}

EMU_API aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
    State& s = state();
    Lock lock(s.mutex);
    auto* event = static_cast<Event*>(handle);
    Stream* stream = resolve(stream_handle);
    Task task;
    task.kind = Kind::Record;
    if (is_external(event)) {
        task.ticket = event->ticket;
        task.ticket->device = stream->device;
        return submit(stream, std::move(task), lock);
    }
    if (stream->capture) {
        event->captured_in = stream->capture;
        event->captured_task = static_cast<int64_t>(stream->capture->tasks.size());
        return append(stream, std::move(task), lock);
    }
    event->captured_in.reset();
    event->captured_task = -1;
    event->ticket = new_ticket();
    event->ticket->device = stream->device;
    task.ticket = event->ticket;
    return submit(stream, std::move(task), lock);
}

EMU_API aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
    State& s = state();
    Lock lock(s.mutex);
    auto* event = static_cast<Event*>(handle);
    Stream* stream = resolve(stream_handle);
    Task task;
    task.kind = Kind::Wait;
    if (is_external(event)) {
        task.ticket = event->ticket;
        return submit(stream, std::move(task), lock);
    }
    if (GraphRef graph = event->captured_in.lock()) {
        if (graph->status == ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE) {
            task.edge = event->captured_task;
            if (!stream->capture) {  // the fork: a wait for a captured event takes the stream into the capture
                if (const aclError none = no_stream_left("a side stream of a capture")) return none;
                stream->capture = graph;
                stream->lane = static_cast<uint32_t>(graph->lanes.size());
                graph->lanes.emplace_back();
                graph->streams.push_back(stream);
            }
            if (stream->capture != graph) {
                graph->status = ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED;
                return fail(answered("conflict", ACL_ERROR_STREAM_CAPTURE_CONFLICT), "a stream being captured waited for an event of another capture",
                                                               "end that capture first, or record the event in this one");
            }
            return append(stream, std::move(task), lock);
        }
        return fail(answered("event-outside", ACL_ERROR_RT_EVENT_CAPTURED), "this event was last recorded inside a capture", "record it again before waiting for it");
    }
    if (!event->ticket) return ACL_SUCCESS;  // never recorded: nothing to wait for
    if (stream->capture) {
        if (event->ticket->done) return ACL_SUCCESS;
        stream->capture->status = ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED;
        return fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY, "a stream being captured waited for unfinished work outside the capture",
                                                     "synchronise before the capture, or use an external event");
    }
    task.ticket = event->ticket;
    return submit(stream, std::move(task), lock);
}

EMU_API aclError aclrtSynchronizeEvent(aclrtEvent handle) {
    Lock lock(state().mutex);
    const auto* event = static_cast<Event*>(handle);
    if (is_being_captured(event)) return refuse_in_capture("event", "waiting for an event of the capture (aclrtSynchronizeEvent)");
    return waited(wait_for_ticket(lock, event->ticket), event->ticket ? event->ticket->device : current_device(), lock);
}

namespace {

// Only torch_npu's allocators make events with this flag alone. What they learn orders no work of the program but that on the
// memory which they hand out again.
bool is_of_allocator(const Event* event) { return event->flags == ACL_EVENT_CAPTURE_STREAM_PROGRESS; }

// torch_npu's allocators query their events under their own locks, where no kernel may run. Any other event of a thread that
// launches is the program's: after the answer a task runs, so that a polling loop ends.
aclError is_done(aclrtEvent handle, bool& done) {
    State& s = state();
    Lock lock(s.mutex);
    const auto* event = static_cast<Event*>(handle);
    if (is_being_captured(event)) return query_of_captured_event();
    done = !event->ticket || event->ticket->done;
    note_query(s);
    if (done && event->ticket) is_of_allocator(event) ? note_ticket_free(event->ticket) : note_ticket_finished(event->ticket);
    if (!done && !is_of_allocator(event) && is_launcher(s) && !s.busy && !s.draining) step(lock, nullptr);
    return ACL_SUCCESS;
}

}  // namespace

EMU_API aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
    bool done = false;
    const aclError answer = is_done(event, done);
    *status = done ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return answer;
}
EMU_API aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
    bool done = false;
    const aclError answer = is_done(event, done);
    *status = done ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
    return answer;
}
EMU_API aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent first, aclrtEvent last) {
    Lock lock(state().mutex);
    const auto* from = static_cast<Event*>(first);
    const auto* to = static_cast<Event*>(last);
    if (((from->flags & to->flags) & ACL_EVENT_TIME_LINE) == 0)
        return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "elapsed time wants two events that keep their times", "create both with enable_timing=True "
                                                          "(ACL_EVENT_TIME_LINE)");
    if (!from->ticket || !to->ticket || !from->ticket->done || !to->ticket->done)
        return fail(ACL_ERROR_RT_EVENT_NOT_COMPLETE, "elapsed time wants two events that were recorded and have completed",
                                                     "record both and synchronise the later one first");
    *milliseconds = static_cast<float>(to->ticket->milliseconds - from->ticket->milliseconds);
    return ACL_SUCCESS;
}
EMU_API aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t* microseconds) {
    Lock lock(state().mutex);
    const auto* event = static_cast<Event*>(handle);
    if ((event->flags & ACL_EVENT_TIME_LINE) == 0)
        return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "the event keeps no time", "create it with enable_timing=True (ACL_EVENT_TIME_LINE)");
    if (!event->ticket || !event->ticket->done)
        return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "the event has not completed", "record it and synchronise it before asking for its time");
    *microseconds = static_cast<uint64_t>(event->ticket->milliseconds * 1000.0);
    return ACL_SUCCESS;
}

EMU_API aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* argument) {
    Lock lock(state().mutex);
    Task task;
    task.kind = Kind::HostCall;
    task.host_function = function;
    task.argument = argument;
    return submit(resolve(stream), std::move(task), lock);
}
EMU_API aclError aclrtLaunchCallback(aclrtCallback function, void* argument, aclrtCallbackBlockType, aclrtStream stream) {
    return aclrtLaunchHostFunc(stream, function, argument);
}
EMU_API aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
EMU_API aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
EMU_API aclError aclrtProcessReport(int32_t) { return ACL_SUCCESS; }
EMU_API aclError aclrtValueWrite(void* address, uint64_t value, uint32_t, aclrtStream stream) {
    Lock lock(state().mutex);
    Task task;
    task.kind = Kind::ValueWrite;
    task.destination = address;
    task.value = value;
    return submit(resolve(stream), std::move(task), lock);
}
EMU_API aclError aclrtValueWait(void* address, uint64_t value, uint32_t flag, aclrtStream stream) {
    if (flag > ACL_STREAM_WAIT_VALUE_NOR)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtValueWait: the comparison must be GEQ, EQ, AND or NOR, got " + std::to_string(flag), "pass one of them");
    Lock lock(state().mutex);
    Task task;
    task.kind = Kind::ValueWait;
    task.source = address;
    task.value = value;
    task.bytes = flag;
    return submit(resolve(stream), std::move(task), lock);
}
