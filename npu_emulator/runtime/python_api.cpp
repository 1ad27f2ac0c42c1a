// The functions for the Python half of the emulator: launch kernels, run them immediately if nothing is queued, read
// counters.
#include <dlfcn.h>

#include <cstring>

#include "emulator.h"

using namespace emu;

namespace {

template <typename Function>
Function* of_python(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

void finish_queue(Lock& lock) {
    State& s = state();
    while (s.pending != 0 && !s.busy && step(lock, nullptr)) {
    }
}

}  // namespace

// A child of an emulated process may start its device before anything gave operators their kernels: where it imports
// torch_npu before torch, or has torch's autoload off.
aclError emu::start_python() {
    auto* run = of_python<int(const char*)>("PyRun_SimpleString");
    if (python_kernel.load() != nullptr || run == nullptr) return ACL_SUCCESS;
    const int held = of_python<int()>("PyGILState_Ensure")();
    const int failed = run("__import__('npu_emulator.activation', fromlist=['resume_in_child']).resume_in_child()");
    of_python<void(int)>("PyGILState_Release")(held);
    if (failed == 0) return ACL_SUCCESS;
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclInit: this process cannot give operators their kernels",
                "see the traceback above; a child of an emulated process must find the package npu_emulator");
}

EMU_API void emu_set_kernel_runner(int (*runner)(uint64_t, const uint64_t*)) { python_kernel = runner; }
EMU_API void emu_set_seed_giver(void (*giver)(uint64_t, uint64_t*)) { python_seeds = giver; }
EMU_API void emu_set_capture_watcher(void (*watcher)(uint64_t)) { python_capture_ends = watcher; }
EMU_API void emu_set_replay_watcher(void (*watcher)()) { python_replayed = watcher; }
EMU_API void emu_set_finders(void (*line)(char*, uint64_t), void (*stack)(char*, uint64_t), uint64_t (*place)()) {
    python_line = line;
    python_stack = stack;
    python_place = place;
}
EMU_API void emu_set_rank_finder(int (*finder)(const char*, char*, uint64_t, uint64_t*, uint64_t)) { python_ranks = finder; }
EMU_API void emu_set_null_kernels(int on) { state().null_kernels = on != 0; }
EMU_API void emu_name_op(uint32_t op, const char* name) {
    State& s = state();
    Lock lock(s.mutex);
    if (s.op_names.size() <= op) s.op_names.resize(op + 1);
    s.op_names[op] = name;
}
EMU_API int emu_null_kernels() { return state().null_kernels; }

// Work in the queue is finished first under the old schedule.
EMU_API void emu_set_schedule(int policy, uint64_t seed, uint32_t depth, const uint32_t* choices, uint64_t count) {
    State& s = state();
    Lock lock(s.mutex);
    finish_queue(lock);
    choose_policy(static_cast<Policy>(policy), seed, depth);
    s.choices.assign(choices, choices + count);
}

// Finishes the work in the queue; fills pairs (choice, number of candidates) of the decisions since the schedule was set, and
// returns their number.
EMU_API uint64_t emu_decisions(uint32_t* out, uint64_t capacity) {
    State& s = state();
    Lock lock(s.mutex);
    finish_queue(lock);
    for (uint64_t turn = 0; turn < std::min<uint64_t>(capacity, s.decisions.size()); ++turn) {
        out[2 * turn] = s.decisions[turn].first;
        out[2 * turn + 1] = s.decisions[turn].second;
    }
    return s.decisions.size();
}

// The number of the graph of a stream's present capture; 0 if there is none.
EMU_API uint64_t emu_capture(void* handle) {
    Lock lock(state().mutex);
    const Stream* stream = resolve(handle);
    return stream->capture ? stream->capture->id : 0;
}

// Sets the number of random generators that the graph of the present capture uses.
EMU_API void emu_capture_draws(void* handle, uint32_t generators) {
    Lock lock(state().mutex);
    resolve(handle)->capture->generators = generators;
}

EMU_API int emu_stream_id(void* handle) {
    Lock lock(state().mutex);
    return resolve(handle)->id;
}

// The fast path of an eager operator. Returns 0: the caller runs the kernel itself now and then calls emu_end; 1: the caller
// queues the kernel with emu_launch; 2: as 0, but with null kernels. After an interrupt that took the answer away, emu_end is
// called, too, and ends what has begun.
EMU_API int emu_begin(void* handle, uint32_t op) {
    State& s = state();
    Lock lock(s.mutex);
    const Stream* stream = resolve(handle);
    if (stream->capture || stream->updating || s.tracing || s.logging || s.policy != Policy::Fifo || s.busy || s.pending != 0) return 1;
    if (s.executed.size() <= op) s.executed.resize(op + 1);
    ++s.executed[op];
    ++s.launched;
    if (s.null_kernels) return 2;
    s.busy = s.immediate = true;
    s.owner = std::this_thread::get_id();
    return 0;
}

EMU_API void emu_end() {
    State& s = state();
    Lock lock(s.mutex);
    if (!s.immediate || s.owner != std::this_thread::get_id()) return;
    s.busy = s.immediate = false;
    while (s.pending != 0 && !s.busy && step(lock, nullptr)) {
    }
    s.changed.notify_all();
    deliver_interrupts();
}

EMU_API int emu_launch(void* handle, uint64_t kernel, uint32_t op) {
    State& s = state();
    Lock lock(s.mutex);
    Task task;
    task.kernel = kernel;
    task.op = op;
    Stream* const stream = resolve(handle);
    task.value = cores_of(stream);
    return submit(stream, std::move(task), lock);
}

// Spoils memory that torch_npu's allocator allocates for a stream, as a part of the last task there.
EMU_API void emu_spoil(void* handle, uint64_t address, uint64_t bytes, uint64_t how) {
    Lock lock(state().mutex);
    Task task;
    task.kind = Kind::Spoil;
    task.destination = reinterpret_cast<void*>(address);
    task.bytes = bytes;
    task.value = how;
    submit_spoiling(resolve(handle), std::move(task), lock);
}

// Memory that the kernel launched next on a captured stream reads or writes.
EMU_API void emu_note_use(void* handle, uint64_t address, uint64_t bytes) {
    Lock lock(state().mutex);
    const Stream* stream = resolve(handle);
    if (stream->capture) note_use(*stream->capture, reinterpret_cast<void*>(address), bytes);
}

// Sets the code of a decision, which a measured device gives in place of the usual one; 0 permits. None: all have the usual one.
EMU_API void emu_set_answer(const char* decision, int32_t code) { set_answer(decision, code); }

// A moment of the host, later than all earlier ones: of an allocation or a free.
EMU_API uint64_t emu_new_moment() {
    Lock lock(state().mutex);
    return ++state().moment;
}

// The last such moment before the launch of the replay that runs now.
EMU_API uint64_t emu_replay_moment() {
    Lock lock(state().mutex);
    return state().replay_moment;
}

// Spoils memory that the allocator frees, unless it is allocated again before.
EMU_API void emu_spoil_freed(uint64_t address, uint64_t bytes, uint64_t how) {
    Lock lock(state().mutex);
    spoil_when_idle(reinterpret_cast<char*>(address), {bytes, how});
}

// No allocations are reported from now on.
EMU_API void emu_stop_poisoning() {
    Lock lock(state().mutex);
    for (auto& [address, freed] : state().freed) freed.how = 0;
}

// Waits for a stream before a host read. Fails while a capture forbids it.
namespace {

// No mode permits a wait for a captured stream, because its work will not run before a replay.
bool may_not_block(const Stream* stream, Lock& lock) { return stream->capture || capture_forbids_here(lock); }

}  // namespace

// Tells whether a capture forbids the calling thread an operation that blocks the host until a stream is idle.
// Returns the code of that refusal, or 0.
EMU_API int emu_may_not_block(void* handle) {
    Lock lock(state().mutex);
    return may_not_block(resolve(handle), lock) ? answered("copy", ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT) : ACL_SUCCESS;
}

// Tells whether only captures of other threads forbid it.
EMU_API int emu_only_others_capture(void* handle) {
    Lock lock(state().mutex);
    return !resolve(handle)->capture && only_others_capture(lock);
}

// Waits; returns the code of what failed, as a negative number where a capture forbids to wait. `what` is the decision that a
// measured device may answer: "read", "size" or "copy".
EMU_API int emu_wait(void* handle, const char* what) {
    State& s = state();
    Lock lock(s.mutex);
    Stream* stream = resolve(handle);
    if (may_not_block(stream, lock))
        if (const aclError refused = answered(what, ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT)) return -refused;
    const aclError status = wait_for_stream(lock, stream);
    return status == ACL_SUCCESS ? take_failure(stream->device, lock) : status;
}

// Called from inside a failing kernel: sets the text that the next synchronisation reports, and its advice.
EMU_API void emu_describe_failure(const char* message, const char* advice) {
    State& s = state();
    Lock lock(s.mutex);
    Failure& failure = s.failures[s.executing];
    if (failure.code != ACL_SUCCESS) return;
    failure.message = message;
    failure.advice = advice;
}

// Moves up to `capacity` numbers of kernels that can no longer run into `out`.
EMU_API uint64_t emu_take_released(uint64_t* out, uint64_t capacity) {
    State& s = state();
    Lock lock(s.mutex);
    uint64_t count = 0;
    while (count < capacity && !s.released.empty()) {
        out[count++] = s.released.back();
        s.released.pop_back();
    }
    return count;
}

EMU_API uint64_t emu_counts(uint64_t* out, uint64_t capacity) {
    State& s = state();
    Lock lock(s.mutex);
    const uint64_t count = std::min<uint64_t>(capacity, s.executed.size());
    if (count != 0) memcpy(out, s.executed.data(), count * sizeof(uint64_t));
    return s.executed.size();
}
