// HCCL's C interface: communicators, and collectives as tasks on streams.
#include <regex.h>

#include <cstdio>
#include <cstring>
#include <utility>

#include "communicator.h"

using namespace emu;

namespace {

Communicator* of(HcclComm handle) { return static_cast<Communicator*>(handle); }

std::shared_ptr<Exchange> exchange(HcclComm comm, Collective kind, HcclDataType type) {
    auto made = std::make_shared<Exchange>();
    made->communicator = of(comm);
    made->kind = kind;
    made->type = type;
    return made;
}

// The counts and places of a form with unequal parts, in elements.
std::vector<Part> parts(const void* counts, const void* displacements, uint32_t ranks, uint64_t element) {
    std::vector<Part> found(ranks);
    for (uint32_t rank = 0; rank < ranks; ++rank)
        found[rank] = {static_cast<const uint64_t*>(counts)[rank] * element, static_cast<const uint64_t*>(displacements)[rank] * element};
    return found;
}

std::vector<Part> equal_parts(uint64_t bytes, uint32_t ranks) {
    std::vector<Part> found(ranks);
    for (uint32_t rank = 0; rank < ranks; ++rank) found[rank] = {bytes, rank * bytes};
    return found;
}

uint64_t end_of(const std::vector<Part>& parts) {
    uint64_t end = 0;
    for (const Part& part : parts)
        if (part.bytes != 0) end = std::max(end, part.offset + part.bytes);
    return end;
}

HcclResult reject(const std::string& cause, const std::string& advice) {
    fail(ACL_ERROR_RT_PARAM_INVALID, cause, advice);
    return HCCL_E_PARA;
}

HcclResult no_type() { return reject("HCCL has no dtype of this number", "take a number of HcclDataType"); }

HcclResult start(std::shared_ptr<Exchange> made, aclrtStream stream) {
    Lock lock(state().mutex);
    Task task;
    task.kind = Kind::Collective;
    made->stream = resolve(stream)->id;
    note_call(*made, 0, Progress::Called);
    task.exchange = std::move(made);
    return submit(resolve(stream), std::move(task), lock) == ACL_SUCCESS ? HCCL_SUCCESS : HCCL_E_RUNTIME;
}

// The messages between HcclGroupStart and HcclGroupEnd of a thread. Those of one communicator on one stream become one batch,
// so that ranks may list their sends and receives in any order. The batch has the first one's place on the stream and runs
// after the group's end; so an event that is recorded behind a message inside the group waits for it.
struct Batch {
    std::shared_ptr<Exchange> exchange;
    aclrtStream stream;
    bool captured;  // a captured task has all its memory at once, so it is appended at the group's end
};
thread_local int group_depth = 0;
thread_local std::vector<Batch> grouped;

HcclResult collect(std::shared_ptr<Exchange> made, aclrtStream handle) {
    bool captured = false;
    {
        Lock lock(state().mutex);
        Stream* stream = resolve(handle);
        captured = stream->capture != nullptr;
        for (const Batch& known : grouped) {
            if (known.exchange->communicator != made->communicator || known.stream != handle) continue;
            if (!captured) note_messages(stream, *made);
            known.exchange->messages.insert(known.exchange->messages.end(), made->messages.begin(), made->messages.end());
            return HCCL_SUCCESS;
        }
        made->open = !captured;
    }
    grouped.push_back({made, handle, captured});
    return captured ? HCCL_SUCCESS : start(std::move(made), handle);
}

HcclResult launch(std::shared_ptr<Exchange> made, const void* send, const void* receive, aclrtStream stream) {
    const Communicator& c = *made->communicator;
    const auto unknown = [](const HcclSendRecvItem& item) { return !is_type(item.dataType); };
    if (!is_type(made->type) || std::any_of(made->messages.begin(), made->messages.end(), unknown)) return no_type();
    if (made->root >= c.ranks)
        return reject(std::string(name_of(made->kind)) + ": " + c.name + " has no rank " + std::to_string(made->root), "choose a root below " + std::to_string(c.ranks));
    made->send = static_cast<const char*>(send);
    made->receive = static_cast<char*>(const_cast<void*>(receive));
    if (const auto find_stack = python_stack.load()) {
        char stack[512] = "";
        const Uninterrupted guard;
        find_stack(stack, sizeof stack);
        made->line = stack;
    }
    return group_depth == 0 || made->kind != Collective::SendReceive ? start(std::move(made), stream) : collect(std::move(made), stream);
}

// The name from a configuration; empty if it has none.
std::string name_in(const HcclCommConfig* config) { return config == nullptr ? "" : config->hcclCommName; }

// The algorithm of each level, for each collective or for all: "level0:NA;level1:ring", "allreduce=level0:NA/allgather=level0:NA".
bool names_algorithms(const char* text) {
    static const char* const form = "^([a-z]+=)?level[0-9]:[A-Za-z0-9_-]+(;level[0-9]:[A-Za-z0-9_-]+)*"
                                    "(/([a-z]+=)?level[0-9]:[A-Za-z0-9_-]+(;level[0-9]:[A-Za-z0-9_-]+)*)*$";
    regex_t compiled;
    if (regcomp(&compiled, form, REG_EXTENDED | REG_NOSUB) != 0) return true;
    const bool found = regexec(&compiled, text, 0, nullptr, 0) == 0;
    regfree(&compiled);
    return found;
}

// The emulated device has one algorithm; what HCCL would refuse is refused.
HcclResult check(const HcclCommConfig* config) {
    uint64_t size = 0;  // of what the caller was compiled with; HCCL's header has no name for it
    if (config != nullptr) memcpy(&size, config, sizeof size);
    if (size < sizeof *config || config->hcclAlgo[0] == 0 || names_algorithms(config->hcclAlgo)) return HCCL_SUCCESS;
    return reject("hccl_algo names no algorithm of a level: " + std::string(config->hcclAlgo).substr(0, 40), "write it as in \"level0:NA;level1:ring\" or \"allreduce=level0:NA;level1:ring\"");
}

HcclResult named(HcclResult result, const HcclCommConfig* config, HcclComm* comm) {
    if (result == HCCL_SUCCESS && !name_in(config).empty()) of(*comm)->name = name_in(config);
    return result;
}

HcclResult join_root(uint32_t ranks, const HcclRootInfo* root, uint32_t rank, std::string name, HcclComm* comm) {
    Communicator* made = nullptr;
    const char* const place = root->internal;
    const HcclResult result = join(place, {ranks}, rank, name.empty() ? "group" : std::move(name), &made, [place](std::vector<Attendee>& known) { return find_ranks(name_of_root(place).c_str(), known); });
    *comm = made;
    return result;
}

bool reduces(HcclDataType type, HcclReduceOp operation) { return type <= HCCL_DATA_TYPE_BFP16 && operation <= HCCL_REDUCE_MIN; }

HcclResult no_reduction(HcclDataType type) {
    return reject(std::string("HCCL does not reduce ") + name_of(type), "convert it to a number of 8 to 64 bits first");
}

}  // namespace

EMU_API HcclResult HcclGetRootInfo(HcclRootInfo* root) {
    memset(root, 0, sizeof *root);
    return make_root(root->internal) ? HCCL_SUCCESS : HCCL_E_SYSCALL;
}
EMU_API HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* root, uint32_t rank, HcclComm* comm) {
    return join_root(ranks, root, rank, "", comm);
}
EMU_API HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* root, uint32_t rank, const HcclCommConfig* config, HcclComm* comm) {
    if (const HcclResult wrong = check(config)) return wrong;
    return join_root(ranks, root, rank, name_in(config), comm);
}
// Of the root infos, the first one is used.
EMU_API HcclResult HcclCommInitRootInfoScalable(uint32_t ranks, uint32_t count, const HcclRootInfo* roots, uint32_t rank, uint32_t, const HcclCommConfig* config, HcclComm* comm) {
    for (uint32_t other = 1; other < count; ++other) close_root(roots[other].internal);
    return HcclCommInitRootInfoConfig(ranks, roots, rank, config, comm);
}
EMU_API HcclResult HcclGetRootInfoScalable(HcclRootInfo* root) { return HcclGetRootInfo(root); }
EMU_API HcclResult HcclCommInitAll(uint32_t count, int32_t* devices, HcclComm* comms) {
    std::vector<Communicator*> made(count);
    const HcclResult result = join_all({devices, devices + count}, made.data());
    std::copy(made.begin(), made.end(), comms);
    return result;
}
EMU_API HcclResult HcclCommInitClusterInfo(const char* table, uint32_t rank, HcclComm* comm) {
    Communicator* made = nullptr;
    const HcclResult result = join_table(table, rank, &made);
    *comm = made;
    return result;
}
EMU_API HcclResult HcclCommInitClusterInfoConfig(const char* table, uint32_t rank, HcclCommConfig* config, HcclComm* comm) {
    if (const HcclResult wrong = check(config)) return wrong;
    return named(HcclCommInitClusterInfo(table, rank, comm), config, comm);
}
// A rank that is no member calls it without members, and gets no communicator.
EMU_API HcclResult HcclCreateSubCommConfig(HcclComm* comm, uint32_t count, uint32_t* members, uint64_t number, uint32_t rank, HcclCommConfig* config, HcclComm* part) {
    *part = nullptr;
    if (members == nullptr) return HCCL_SUCCESS;
    if (const HcclResult wrong = check(config)) return wrong;
    const std::vector<uint32_t> ranks(members, members + count);
    if (rank >= count || ranks[rank] != of(*comm)->rank || *std::max_element(ranks.begin(), ranks.end()) >= of(*comm)->ranks)
        return reject("HcclCreateSubCommConfig: rank " + std::to_string(of(*comm)->rank) + " of " + of(*comm)->name + " is not member " + std::to_string(rank) + " of the part", "list the parent's ranks");
    Communicator* made = nullptr;
    const HcclResult result = join_part(*of(*comm), ranks, number, rank, name_in(config), &made);
    *part = made;
    return result;
}
EMU_API HcclResult HcclCommDestroy(HcclComm comm) {
    {
        Lock lock(state().mutex);
        // If a thread waits for the device already, another one destroys the communicator to end that: an abort.
        if (of(comm)->failed.load() == HCCL_SUCCESS && state().waiting.empty()) wait_for_device(lock, of(comm)->device);
    }
    return leave(of(comm));
}
EMU_API HcclResult HcclGetCommName(HcclComm comm, char* name) {
    snprintf(name, 128, "%s", of(comm)->name.c_str());
    return HCCL_SUCCESS;
}
EMU_API HcclResult HcclGetRankSize(HcclComm comm, uint32_t* ranks) {
    *ranks = of(comm)->ranks;
    return HCCL_SUCCESS;
}
EMU_API HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
    *rank = of(comm)->rank;
    return HCCL_SUCCESS;
}
EMU_API HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult* error) {
    *error = static_cast<HcclResult>(of(comm)->failed.load());
    return HCCL_SUCCESS;
}
EMU_API const char* HcclGetErrorString(HcclResult code) {
    switch (code) {
        case HCCL_SUCCESS: return "no error";
        case HCCL_E_PARA: return "parameter error: the ranks called different collectives, or an argument is wrong";
        case HCCL_E_TIMEOUT: return "timeout: a rank did not come";
        case HCCL_E_REMOTE: return "remote error: another rank has ended or failed";
        default: return "error of the emulated HCCL";
    }
}
// Of the settings of HcclCommConfig that have a number, the name is read (number 2).
EMU_API uint32_t HcclGetCommConfigCapability() { return 3; }

EMU_API HcclResult HcclAllReduce(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp operation, HcclComm comm, aclrtStream stream) {
    if (!reduces(type, operation)) return no_reduction(type);
    auto made = exchange(comm, Collective::AllReduce, type);
    made->operation = operation;
    made->given = {{count * size_of(type), 0}};
    made->send_bytes = made->receive_bytes = count * size_of(type);
    return launch(std::move(made), send, receive, stream);
}
EMU_API HcclResult HcclReduce(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp operation, uint32_t root, HcclComm comm, aclrtStream stream) {
    if (!reduces(type, operation)) return no_reduction(type);
    auto made = exchange(comm, Collective::Reduce, type);
    made->operation = operation;
    made->root = root;
    made->given = {{count * size_of(type), 0}};
    made->send_bytes = count * size_of(type);
    made->receive_bytes = of(comm)->rank == root ? made->send_bytes : 0;
    return launch(std::move(made), send, receive, stream);
}
EMU_API HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream stream) {
    auto made = exchange(comm, Collective::Broadcast, type);
    made->root = root;
    made->given = {{count * size_of(type), 0}};
    (of(comm)->rank == root ? made->send_bytes : made->receive_bytes) = count * size_of(type);
    return launch(std::move(made), buffer, buffer, stream);
}
EMU_API HcclResult HcclAllGather(void* send, void* receive, uint64_t count, HcclDataType type, HcclComm comm, aclrtStream stream) {
    auto made = exchange(comm, Collective::AllGather, type);
    made->given = {{count * size_of(type), 0}};
    made->taken = equal_parts(count * size_of(type), of(comm)->ranks);
    made->send_bytes = count * size_of(type);
    made->receive_bytes = end_of(made->taken);
    return launch(std::move(made), send, receive, stream);
}
EMU_API HcclResult HcclAllGatherV(void* send, uint64_t count, void* receive, const void* counts, const void* displacements, HcclDataType type, HcclComm comm, aclrtStream stream) {
    auto made = exchange(comm, Collective::AllGather, type);
    made->taken = parts(counts, displacements, of(comm)->ranks, size_of(type));
    if (made->taken[of(comm)->rank].bytes != count * size_of(type))
        return reject("HcclAllGatherV: this rank sends " + std::to_string(count) + " elements and its counts say " +
                          std::to_string(made->taken[of(comm)->rank].bytes / size_of(type)), "give every rank the same counts");
    made->send_bytes = count * size_of(type);
    made->receive_bytes = end_of(made->taken);
    return launch(std::move(made), send, receive, stream);
}
EMU_API HcclResult HcclReduceScatter(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp operation, HcclComm comm, aclrtStream stream) {
    if (!reduces(type, operation)) return no_reduction(type);
    auto made = exchange(comm, Collective::ReduceScatter, type);
    made->operation = operation;
    made->given = equal_parts(count * size_of(type), of(comm)->ranks);
    made->send_bytes = end_of(made->given);
    made->receive_bytes = count * size_of(type);
    return launch(std::move(made), send, receive, stream);
}
EMU_API HcclResult HcclReduceScatterV(void* send, const void* counts, const void* displacements, void* receive, uint64_t count, HcclDataType type, HcclReduceOp operation, HcclComm comm, aclrtStream stream) {
    if (!reduces(type, operation)) return no_reduction(type);
    auto made = exchange(comm, Collective::ReduceScatter, type);
    made->operation = operation;
    made->given = parts(counts, displacements, of(comm)->ranks, size_of(type));
    if (made->given[of(comm)->rank].bytes != count * size_of(type))
        return reject("HcclReduceScatterV: this rank receives " + std::to_string(count) + " elements and its counts say " +
                          std::to_string(made->given[of(comm)->rank].bytes / size_of(type)), "give every rank the same counts");
    made->send_bytes = end_of(made->given);
    made->receive_bytes = count * size_of(type);
    return launch(std::move(made), send, receive, stream);
}
EMU_API HcclResult HcclScatter(void* send, void* receive, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream stream) {
    auto made = exchange(comm, Collective::Scatter, type);
    made->root = root;
    made->given = equal_parts(count * size_of(type), of(comm)->ranks);
    made->taken = {{count * size_of(type), 0}};
    made->send_bytes = of(comm)->rank == root ? end_of(made->given) : 0;
    made->receive_bytes = count * size_of(type);
    return launch(std::move(made), send, receive, stream);
}
EMU_API HcclResult HcclAlltoAll(const void* send, uint64_t send_count, HcclDataType send_type, const void* receive, uint64_t receive_count, HcclDataType receive_type, HcclComm comm, aclrtStream stream) {
    if (!is_type(receive_type)) return no_type();
    auto made = exchange(comm, Collective::AllToAll, send_type);
    made->given = equal_parts(send_count * size_of(send_type), of(comm)->ranks);
    made->taken = equal_parts(receive_count * size_of(receive_type), of(comm)->ranks);
    made->send_bytes = end_of(made->given);
    made->receive_bytes = end_of(made->taken);
    return launch(std::move(made), send, receive, stream);
}
EMU_API HcclResult HcclAlltoAllV(const void* send, const void* send_counts, const void* send_places, HcclDataType send_type, const void* receive, const void* receive_counts, const void* receive_places, HcclDataType receive_type, HcclComm comm, aclrtStream stream) {
    if (!is_type(receive_type)) return no_type();
    auto made = exchange(comm, Collective::AllToAll, send_type);
    made->given = parts(send_counts, send_places, of(comm)->ranks, size_of(send_type));
    made->taken = parts(receive_counts, receive_places, of(comm)->ranks, size_of(receive_type));
    made->send_bytes = end_of(made->given);
    made->receive_bytes = end_of(made->taken);
    return launch(std::move(made), send, receive, stream);
}
// The matrix has for each rank, one after the other, how many elements it sends to each.
EMU_API HcclResult HcclAlltoAllVC(const void* send, const void* matrix, HcclDataType send_type, const void* receive, HcclDataType receive_type, HcclComm comm, aclrtStream stream) {
    const uint32_t ranks = of(comm)->ranks, rank = of(comm)->rank;
    const auto* counts = static_cast<const uint64_t*>(matrix);
    std::vector<uint64_t> gives(ranks), takes(ranks), give_places(ranks), take_places(ranks);
    for (uint32_t other = 0; other < ranks; ++other) {
        gives[other] = counts[rank * ranks + other];
        takes[other] = counts[other * ranks + rank];
        if (other == 0) continue;
        give_places[other] = give_places[other - 1] + gives[other - 1];
        take_places[other] = take_places[other - 1] + takes[other - 1];
    }
    return HcclAlltoAllV(send, gives.data(), give_places.data(), send_type, receive, takes.data(), take_places.data(), receive_type, comm, stream);
}
EMU_API HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
    return launch(exchange(comm, Collective::Barrier, HCCL_DATA_TYPE_INT8), nullptr, nullptr, stream);
}
EMU_API HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm comm, aclrtStream stream) {
    auto made = exchange(comm, Collective::SendReceive, HCCL_DATA_TYPE_INT8);
    made->messages.assign(items, items + count);
    for (const HcclSendRecvItem& item : made->messages)
        if (item.remoteRank >= of(comm)->ranks)
            return reject("send and receive: " + of(comm)->name + " has no rank " + std::to_string(item.remoteRank), "choose a rank below " + std::to_string(of(comm)->ranks));
    return launch(std::move(made), nullptr, nullptr, stream);
}
EMU_API HcclResult HcclGroupStart() {
    ++group_depth;
    return HCCL_SUCCESS;
}
EMU_API HcclResult HcclGroupEnd() {
    if (group_depth == 0) return reject("HcclGroupEnd: no group has begun on this thread", "call HcclGroupStart before");
    if (--group_depth != 0) return HCCL_SUCCESS;
    HcclResult result = HCCL_SUCCESS;
    for (Batch& batch : std::exchange(grouped, {})) {
        if (batch.captured) {
            const HcclResult started = start(std::move(batch.exchange), batch.stream);
            if (result == HCCL_SUCCESS) result = started;
        } else {
            Lock lock(state().mutex);
            batch.exchange->open = false;
            run_what_is_due(lock);
        }
    }
    return result;
}
EMU_API HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType type, uint32_t to, HcclComm comm, aclrtStream stream) {
    HcclSendRecvItem item{HCCL_SEND, buffer, count, type, to};
    return HcclBatchSendRecv(&item, 1, comm, stream);
}
EMU_API HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType type, uint32_t from, HcclComm comm, aclrtStream stream) {
    HcclSendRecvItem item{HCCL_RECV, buffer, count, type, from};
    return HcclBatchSendRecv(&item, 1, comm, stream);
}
