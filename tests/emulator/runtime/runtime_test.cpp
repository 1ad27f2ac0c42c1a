// Tests of the emulated CANN runtime alone: no Python, no torch. They use several threads, so that sanitizers see what a
// program with data loaders, a server or autograd's threads does. Prints the name of each test; exits 1 at the first failure.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>

#include "runtime.cpp"

#ifdef PAGE  // a kernel with pages of that size, as they are on many machines with aarch64
#include <sys/syscall.h>
#include <unistd.h>
extern "C" long sysconf(int) noexcept { return PAGE; }
extern "C" int madvise(void* start, size_t length, int advice) noexcept {
    if (reinterpret_cast<uintptr_t>(start) % PAGE != 0) return -1;
    return static_cast<int>(syscall(SYS_madvise, start, (length + PAGE - 1) / PAGE * PAGE, advice));  // rounded up as kernels do
}
#endif

namespace {

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition);  \
            exit(1);                                                                  \
        }                                                                             \
    } while (0)
#define OK(call) CHECK((call) == ACL_SUCCESS)

constexpr int kThreads = 4, kSteps = 50;
const emu::Policy kPolicies[] = {emu::Policy::Fifo, emu::Policy::Lazy, emu::Policy::Random, emu::Policy::Pct};

void schedule(emu::Policy policy, uint64_t seed) { emu_set_schedule(static_cast<int>(policy), seed, 3, nullptr, 0); }

void in_threads(const std::function<void(int)>& work) {
    std::vector<std::thread> threads;
    for (int number = 0; number < kThreads; ++number) threads.emplace_back(work, number);
    for (auto& thread : threads) thread.join();
}

template <typename T>
T* device_memory(size_t count) {
    void* pointer = nullptr;
    OK(aclrtMalloc(&pointer, count * sizeof(T), ACL_MEM_MALLOC_HUGE_FIRST));
    return static_cast<T*>(pointer);
}

aclrtStream new_stream() {
    aclrtStream stream = nullptr;
    OK(aclrtCreateStream(&stream));
    return stream;
}

aclrtEvent new_event() {
    aclrtEvent event = nullptr;
    OK(aclrtCreateEventWithFlag(&event, ACL_EVENT_SYNC));
    return event;
}

// A kernel that is a C++ function: adds one to the cell that its number stands for, and lets other threads in.
std::atomic<uint64_t*> cells[64];
int add_one(uint64_t kernel, const uint64_t*) {
    ++*cells[kernel].load();
    std::this_thread::yield();
    return 0;
}

void memory_is_given_back_without_harm_to_neighbours() {
    const size_t sizes[] = {1, 511, 513, 4095, 4096, 65535, 65537, 300000};
    for (const size_t before : {size_t{65536}, size_t{700}}) {  // at the start of a page of any size, and within one
        for (const size_t size : sizes) {
            auto* left = device_memory<char>(before);
            auto* middle = device_memory<char>(size);
            auto* right = device_memory<char>(size);
            memset(left, 1, before);
            memset(right, 2, size);
            OK(aclrtFree(middle));
            for (size_t at = 0; at < before; ++at) CHECK(left[at] == 1);
            for (size_t at = 0; at < size; ++at) CHECK(right[at] == 2);
            CHECK(aclrtFree(middle) != ACL_SUCCESS);  // once is enough
            OK(aclrtFree(left));
            OK(aclrtFree(right));
        }
    }
    size_t free_bytes = 0, total = 0;
    OK(aclrtGetMemInfo(ACL_HBM_MEM, &free_bytes, &total));
    CHECK(free_bytes == total);
}

void too_much_memory_is_refused() {
    void* pointer = nullptr;
    CHECK(aclrtMalloc(&pointer, size_t{1} << 50, ACL_MEM_MALLOC_HUGE_FIRST) == ACL_ERROR_RT_MEMORY_ALLOCATION);
    CHECK(pointer == nullptr && strstr(aclGetRecentErrMsg(), "out of emulated device memory") != nullptr);
}

void threads_allocate_side_by_side() {
    in_threads([](int number) {
        for (int step = 0; step < kSteps; ++step) {
            const size_t count = 100 + 37 * static_cast<size_t>(step);
            auto* mine = device_memory<int>(count);
            for (size_t at = 0; at < count; ++at) mine[at] = number;
            for (size_t at = 0; at < count; ++at) CHECK(mine[at] == number);
            OK(aclrtFree(mine));
        }
    });
}

// a -> side -> main, with events, while the schedule may run either stream first.
void events_order_two_streams() {
    for (const emu::Policy policy : kPolicies) {
        for (uint64_t seed = 0; seed < 5; ++seed) {
            schedule(policy, seed);
            aclrtStream main = new_stream(), side = new_stream();
            aclrtEvent fork = new_event(), join = new_event();
            auto* a = device_memory<int>(3);
            const int seven = 7;
            OK(aclrtMemcpyAsync(a, 4, &seven, 4, ACL_MEMCPY_HOST_TO_DEVICE, main));
            OK(aclrtRecordEvent(fork, main));
            OK(aclrtStreamWaitEvent(side, fork));
            OK(aclrtMemcpyAsync(a + 1, 4, a, 4, ACL_MEMCPY_DEVICE_TO_DEVICE, side));
            OK(aclrtRecordEvent(join, side));
            OK(aclrtStreamWaitEvent(main, join));
            OK(aclrtMemcpyAsync(a + 2, 4, a + 1, 4, ACL_MEMCPY_DEVICE_TO_DEVICE, main));
            OK(aclrtSynchronizeStream(main));
            CHECK(a[2] == 7);
            OK(aclrtDestroyEvent(fork));
            OK(aclrtDestroyEvent(join));
            OK(aclrtDestroyStream(main));
            OK(aclrtDestroyStream(side));
            OK(aclrtFree(a));
        }
    }
}

void a_stream_that_nobody_waits_for_is_late_under_lazy() {
    schedule(emu::Policy::Lazy, 0);
    aclrtStream side = new_stream(), main = new_stream();
    auto* a = device_memory<int>(1);
    a[0] = 0;
    OK(aclrtMemsetAsync(a, 4, 1, 4, side));
    int seen = -1;
    OK(aclrtMemcpyAsync(&seen, 4, a, 4, ACL_MEMCPY_DEVICE_TO_HOST, main));
    OK(aclrtSynchronizeStream(main));
    CHECK(seen == 0);  // a race, and the schedule shows it
    OK(aclrtSynchronizeDevice());
    CHECK(a[0] == 0x01010101);
    OK(aclrtDestroyStream(main));
    OK(aclrtDestroyStream(side));
    OK(aclrtFree(a));
}

void a_wait_that_nothing_ends_is_a_deadlock() {
    schedule(emu::Policy::Fifo, 0);
    aclrtStream stream = new_stream();
    auto* word = device_memory<uint64_t>(1);
    *word = 0;
    OK(aclrtValueWait(word, 5, ACL_STREAM_WAIT_VALUE_EQ, stream));
    CHECK(aclrtSynchronizeStream(stream) == ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    aclrtStream other = new_stream();
    OK(aclrtValueWrite(word, 5, 0, other));
    OK(aclrtSynchronizeDevice());
    OK(aclrtDestroyStream(other));
    OK(aclrtDestroyStream(stream));
    OK(aclrtFree(word));
}

void threads_launch_and_synchronise_side_by_side() {
    emu_set_kernel_runner(add_one);
    for (const emu::Policy policy : kPolicies) {
        schedule(policy, 1);
        std::vector<uint64_t> counts(kThreads, 0);
        in_threads([&](int number) {
            cells[number] = &counts[static_cast<size_t>(number)];
            aclrtStream stream = new_stream();
            aclrtEvent event = new_event();
            for (int step = 1; step <= kSteps; ++step) {
                OK(emu_launch(stream, static_cast<uint64_t>(number), 0));
                OK(aclrtRecordEvent(event, stream));
                if (step % 5 != 0) continue;
                OK(aclrtSynchronizeEvent(event));
                CHECK(counts[static_cast<size_t>(number)] == static_cast<uint64_t>(step));
            }
            OK(aclrtSynchronizeStream(stream));
            OK(aclrtDestroyEvent(event));
            OK(aclrtDestroyStream(stream));
        });
    }
}

aclmdlRI captured_increment(aclrtStream main, aclrtStream side, uint64_t kernel, aclrtEvent external) {
    aclrtEvent fork = new_event(), join = new_event();
    OK(aclmdlRICaptureBegin(main, ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL));
    OK(emu_launch(main, kernel, 0));
    OK(aclrtRecordEvent(fork, main));
    OK(aclrtStreamWaitEvent(side, fork));
    OK(emu_launch(side, kernel, 0));
    OK(aclrtRecordEvent(join, side));
    OK(aclrtStreamWaitEvent(main, join));
    OK(emu_launch(main, kernel, 0));
    if (external != nullptr) OK(aclrtRecordEvent(external, main));
    aclmdlRI graph = nullptr;
    OK(aclmdlRICaptureEnd(main, &graph));
    OK(aclrtDestroyEvent(fork));
    OK(aclrtDestroyEvent(join));
    return graph;
}

void graphs_are_captured_and_replayed_side_by_side() {
    emu_set_kernel_runner(add_one);
    for (const emu::Policy policy : kPolicies) {
        schedule(policy, 2);
        std::vector<uint64_t> counts(kThreads, 0);
        in_threads([&](int number) {
            cells[number] = &counts[static_cast<size_t>(number)];
            aclrtStream main = new_stream(), side = new_stream();
            aclmdlRI graph = captured_increment(main, side, static_cast<uint64_t>(number), nullptr);
            CHECK(counts[static_cast<size_t>(number)] == 0);  // a capture runs nothing
            for (int step = 0; step < kSteps; ++step) OK(aclmdlRIExecuteAsync(graph, main));
            OK(aclrtSynchronizeStream(main));
            CHECK(counts[static_cast<size_t>(number)] == 3 * kSteps);
            OK(aclmdlRIDestroy(graph));
            OK(aclrtDestroyStream(main));
            OK(aclrtDestroyStream(side));
        });
    }
}

// One thread replays a graph that records an external event; another one waits for that event on the host.
void a_thread_waits_for_an_event_that_a_replay_records() {
    emu_set_kernel_runner(add_one);
    for (const emu::Policy policy : kPolicies) {
        schedule(policy, 3);
        uint64_t count = 0;
        cells[0] = &count;
        aclrtStream main = new_stream(), side = new_stream();
        aclrtEvent done = nullptr;
        OK(aclrtCreateEventExWithFlag(&done, ACL_EVENT_EXTERNAL));
        aclmdlRI graph = captured_increment(main, side, 0, done);
        std::atomic<bool> launched{false};
        std::thread waiting([&] {
            while (!launched) std::this_thread::yield();
            for (int step = 0; step < kSteps; ++step) OK(aclrtSynchronizeEvent(done));
        });
        for (int step = 0; step < kSteps; ++step) {
            OK(aclmdlRIExecuteAsync(graph, main));
            launched = true;
        }
        OK(aclrtSynchronizeStream(main));
        waiting.join();
        CHECK(count == 3 * kSteps);
        OK(aclmdlRIDestroy(graph));
        OK(aclrtDestroyEvent(done));
        OK(aclrtDestroyStream(main));
        OK(aclrtDestroyStream(side));
    }
}

void a_capture_forbids_what_would_block() {
    schedule(emu::Policy::Fifo, 0);
    aclrtStream stream = new_stream();
    OK(aclmdlRICaptureBegin(stream, ACL_MODEL_RI_CAPTURE_MODE_GLOBAL));
    CHECK(aclrtSynchronizeStream(stream) != ACL_SUCCESS);
    aclmdlRI graph = nullptr;
    aclmdlRICaptureEnd(stream, &graph);
    if (graph != nullptr) OK(aclmdlRIDestroy(graph));
    OK(aclrtDestroyStream(stream));
}

void the_log_is_read_while_others_launch() {
    emu_set_kernel_runner(add_one);
    schedule(emu::Policy::Random, 4);
    std::vector<uint64_t> counts(kThreads, 0);
    emu_set_logging(1);
    std::atomic<uint64_t> seen{0};
    std::atomic<bool> over{false};
    std::thread reader([&] {
        std::vector<emu::Note> notes(64);
        while (true) {
            const bool last = over;
            const uint64_t count = emu_take_ran(reinterpret_cast<uint64_t*>(notes.data()), notes.size());
            seen += count;
            if (last && count == 0) return;
        }
    });
    in_threads([&](int number) {
        cells[number] = &counts[static_cast<size_t>(number)];
        aclrtStream stream = new_stream();
        for (int step = 0; step < kSteps; ++step) OK(emu_launch(stream, static_cast<uint64_t>(number), 0));
        OK(aclrtSynchronizeStream(stream));
        OK(aclrtDestroyStream(stream));
    });
    over = true;
    reader.join();
    emu_set_logging(0);
    CHECK(seen > 0);
    CHECK(std::accumulate(counts.begin(), counts.end(), uint64_t{0}) == kThreads * kSteps);
}
// -- HCCL: the ranks are threads of this process, each with a communicator and a stream of its own.

void with_ranks(uint32_t ranks, const std::function<void(uint32_t, HcclComm, aclrtStream)>& work) {
    HcclRootInfo root;
    CHECK(HcclGetRootInfo(&root) == HCCL_SUCCESS);
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < ranks; ++rank)
        threads.emplace_back([&, rank] {
            OK(aclrtSetDevice(0));
            HcclComm comm = nullptr;
            CHECK(HcclCommInitRootInfo(ranks, &root, rank, &comm) == HCCL_SUCCESS);
            aclrtStream stream = new_stream();
            work(rank, comm, stream);
            CHECK(HcclCommDestroy(comm) == HCCL_SUCCESS);
            OK(aclrtDestroyStream(stream));
        });
    for (auto& thread : threads) thread.join();
}

constexpr uint32_t kRanks = 3;

void reductions_over_three_ranks() {
    constexpr uint64_t kCount = 700'000;  // more than one window of floats
    with_ranks(kRanks, [](uint32_t rank, HcclComm comm, aclrtStream stream) {
        auto* given = device_memory<float>(kCount);
        auto* sums = device_memory<float>(kCount);
        for (int turn = 0; turn < 3; ++turn) {
            for (uint64_t at = 0; at < kCount; ++at) given[at] = static_cast<float>(at % 1000 + rank + turn);
            CHECK(HcclAllReduce(given, sums, kCount, HCCL_DATA_TYPE_FP32, HCCL_REDUCE_SUM, comm, stream) == HCCL_SUCCESS);
            OK(aclrtSynchronizeStream(stream));
            for (uint64_t at = 0; at < kCount; ++at) CHECK(sums[at] == static_cast<float>(kRanks * (at % 1000 + turn) + 3));
        }
        OK(aclrtFree(given));
        OK(aclrtFree(sums));
    });
}

void small_floats_round_at_each_sum() {
    with_ranks(2, [](uint32_t rank, HcclComm comm, aclrtStream stream) {
        // 1 + 2^-11 is half way between two float16 and rounds to even; so does 1 + 2^-8 of bfloat16.
        const uint16_t halves[2][4] = {{0x3C00, 0x3C01, 0x7BFF, 0x0001}, {0x1000, 0x1000, 0x7BFF, 0x0001}};
        const uint16_t half_sums[4] = {0x3C00, 0x3C02, 0x7C00, 0x0002};
        const uint16_t brains[2][2] = {{0x3F80, 0x3F81}, {0x3B80, 0x3B80}};
        const uint16_t brain_sums[2] = {0x3F80, 0x3F82};
        auto* memory = device_memory<uint16_t>(4);
        memcpy(memory, halves[rank], sizeof halves[rank]);
        CHECK(HcclAllReduce(memory, memory, 4, HCCL_DATA_TYPE_FP16, HCCL_REDUCE_SUM, comm, stream) == HCCL_SUCCESS);
        OK(aclrtSynchronizeStream(stream));
        CHECK(memcmp(memory, half_sums, sizeof half_sums) == 0);
        memcpy(memory, brains[rank], sizeof brains[rank]);
        CHECK(HcclAllReduce(memory, memory, 2, HCCL_DATA_TYPE_BFP16, HCCL_REDUCE_SUM, comm, stream) == HCCL_SUCCESS);
        OK(aclrtSynchronizeStream(stream));
        CHECK(memcmp(memory, brain_sums, sizeof brain_sums) == 0);
        OK(aclrtFree(memory));
    });
}

// Rank 0 sends two messages of several parts; both ranks send to each other in one batch.
void messages_in_both_directions() {
    constexpr uint64_t kCount = 300'000;
    with_ranks(2, [](uint32_t rank, HcclComm comm, aclrtStream stream) {
        auto* out = device_memory<int64_t>(2 * kCount);
        auto* in = device_memory<int64_t>(2 * kCount);
        for (uint64_t at = 0; at < 2 * kCount; ++at) out[at] = static_cast<int64_t>(at * 10 + rank);
        HcclSendRecvItem items[] = {{HCCL_RECV, in, kCount, HCCL_DATA_TYPE_INT64, 1 - rank},
                                    {HCCL_SEND, out, kCount, HCCL_DATA_TYPE_INT64, 1 - rank},
                                    {HCCL_RECV, in + kCount, kCount, HCCL_DATA_TYPE_INT64, 1 - rank},
                                    {HCCL_SEND, out + kCount, kCount, HCCL_DATA_TYPE_INT64, 1 - rank}};
        CHECK(HcclBatchSendRecv(items, 4, comm, stream) == HCCL_SUCCESS);
        OK(aclrtSynchronizeStream(stream));
        for (uint64_t at = 0; at < 2 * kCount; ++at) CHECK(in[at] == static_cast<int64_t>(at * 10 + 1 - rank));
        OK(aclrtFree(out));
        OK(aclrtFree(in));
    });
}

// Nobody waits on rank 0, whose work is queued and whose program does something else, until rank 1 needs it.
void a_waiting_rank_makes_the_other_run() {
    std::atomic<bool> done{false};
    with_ranks(2, [&](uint32_t rank, HcclComm comm, aclrtStream stream) {
        auto* memory = device_memory<int32_t>(1);
        OK(aclrtMemsetAsync(memory, 4, 1, 4, stream));
        CHECK(HcclAllReduce(memory, memory, 1, HCCL_DATA_TYPE_INT32, HCCL_REDUCE_SUM, comm, stream) == HCCL_SUCCESS);
        if (rank == 1) {
            OK(aclrtSynchronizeStream(stream));
            done = true;
        }
        while (!done) std::this_thread::yield();
        OK(aclrtSynchronizeStream(stream));
        CHECK(*memory == 0x02020202);
        OK(aclrtFree(memory));
    });
}

void different_collectives_fail_on_every_rank() {
    with_ranks(2, [](uint32_t rank, HcclComm comm, aclrtStream stream) {
        auto* memory = device_memory<int32_t>(8);
        CHECK(HcclAllReduce(memory, memory, rank == 0 ? 4 : 5, HCCL_DATA_TYPE_INT32, HCCL_REDUCE_SUM, comm, stream) == HCCL_SUCCESS);
        aclrtSynchronizeStream(stream);  // both ranks are one device here: one of them takes the error
        HcclResult error = HCCL_SUCCESS;
        CHECK(HcclGetCommAsyncError(comm, &error) == HCCL_SUCCESS);
        CHECK(error == HCCL_E_PARA);
        OK(aclrtFree(memory));
    });
}

void a_captured_collective() {
    with_ranks(2, [](uint32_t rank, HcclComm comm, aclrtStream stream) {
        auto* memory = device_memory<int32_t>(2);
        OK(aclmdlRICaptureBegin(stream, ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL));
        CHECK(HcclAllReduce(memory, memory + 1, 1, HCCL_DATA_TYPE_INT32, HCCL_REDUCE_SUM, comm, stream) == HCCL_SUCCESS);
        aclmdlRI graph = nullptr;
        OK(aclmdlRICaptureEnd(stream, &graph));
        for (int32_t turn = 0; turn < 5; ++turn) {
            memory[0] = turn + static_cast<int32_t>(rank);
            OK(aclmdlRIExecuteAsync(graph, stream));
            OK(aclrtSynchronizeStream(stream));
            CHECK(memory[1] == 2 * turn + 1);
        }
        OK(aclmdlRIDestroy(graph));
        OK(aclrtFree(memory));
    });
}

// Each thread in its own loop, with no other call in between: a lock there would order them and hide a race from a sanitizer.
void all_at_once(const std::function<void(int)>& work) {
    in_threads([&](int number) {
        for (int step = 0; step < kSteps; ++step) work(number);
    });
}

void settings_change_while_others_read_them() {
    const auto cubes = ACL_RT_DEV_RES_CUBE_CORE;
    const auto deterministic = static_cast<aclSysParamOpt>(0);
    const auto debug_level = static_cast<aclCompileOpt>(5);
    all_at_once([&](int number) {
        uint32_t cores = 0;
        OK(aclrtSetDeviceResLimit(number, cubes, 5));
        OK(aclrtGetResInCurrentThread(cubes, &cores));
        CHECK(cores == 5 || cores == 24);
        OK(aclrtResetDeviceResLimit(number));
    });
    all_at_once([&](int) {
        int64_t value = -1;
        OK(aclrtSetSysParamOpt(deterministic, 1));
        OK(aclrtCtxGetSysParamOpt(deterministic, &value));
        CHECK(value == 1);
    });
    all_at_once([&](int number) {
        const char* const words[] = {"enable", "a word of more letters than a string keeps in itself"};
        char found[64] = "";
        OK(aclSetCompileopt(debug_level, words[number % 2]));
        CHECK(aclGetCompileoptSize(debug_level) > strlen(words[0]));
        OK(aclGetCompileopt(debug_level, found, sizeof found));
        CHECK(strcmp(found, words[0]) == 0 || strcmp(found, words[1]) == 0);
    });
    all_at_once([&](int number) {
        CHECK(aclnnReselectStaticKernelWithPath(number % 2 == 0 ? "/folder" : "/another folder, with a longer name") == 0);
        CHECK(emu_static_kernel_selections() > 0);
    });
    std::atomic<uint64_t> shadow{0};
    all_at_once([&](int) {
        uint64_t first = 0;
        const uint64_t mine = emu_shadow(0);
        CHECK(shadow.compare_exchange_strong(first, mine) || first == mine);
    });
}

// As a program that profiles or measures a part of itself, while its other threads work.
void switches_change_while_others_launch() {
    emu_set_kernel_runner(add_one);
    schedule(emu::Policy::Fifo, 0);
    std::vector<uint64_t> counts(kThreads, 0);
    std::atomic<bool> over{false};
    std::thread switching([&] {
        for (int step = 0; !over; ++step) {
            emu_set_null_kernels(step % 2);
            emu_set_logging(step % 3 == 0);
            emu_set_kernel_runner(add_one);
        }
    });
    in_threads([&](int number) {
        cells[number] = &counts[static_cast<size_t>(number)];
        aclrtStream main = new_stream(), side = new_stream();
        aclmdlRI graph = captured_increment(main, side, static_cast<uint64_t>(number), nullptr);
        for (int step = 0; step < kSteps; ++step) OK(aclmdlRIExecuteAsync(graph, main));
        OK(aclrtSynchronizeStream(main));
        OK(aclmdlRIDestroy(graph));
        OK(aclrtDestroyStream(main));
        OK(aclrtDestroyStream(side));
    });
    over = true;
    switching.join();
    emu_set_null_kernels(0);
    emu_set_logging(0);
}

struct Test {
    const char* name;
    void (*run)();
};
#define TEST(name) {#name, name}
const Test kTests[] = {
    TEST(memory_is_given_back_without_harm_to_neighbours),
    TEST(too_much_memory_is_refused),
    TEST(threads_allocate_side_by_side),
    TEST(events_order_two_streams),
    TEST(a_stream_that_nobody_waits_for_is_late_under_lazy),
    TEST(a_wait_that_nothing_ends_is_a_deadlock),
    TEST(threads_launch_and_synchronise_side_by_side),
    TEST(graphs_are_captured_and_replayed_side_by_side),
    TEST(a_thread_waits_for_an_event_that_a_replay_records),
    TEST(a_capture_forbids_what_would_block),
    TEST(the_log_is_read_while_others_launch),
    TEST(settings_change_while_others_read_them),
    TEST(switches_change_while_others_launch),
    TEST(reductions_over_three_ranks),
    TEST(small_floats_round_at_each_sum),
    TEST(messages_in_both_directions),
    TEST(a_waiting_rank_makes_the_other_run),
    TEST(different_collectives_fail_on_every_rank),
    TEST(a_captured_collective),
};

}  // namespace

int main() {
    emu_set_memory(size_t{1} << 30);
    OK(aclrtSetDevice(0));
    for (const Test& test : kTests) {
        printf("%s\n", test.name);
        fflush(stdout);
        test.run();
    }
    return 0;
}
