// The exchange inside an operator that computes and communicates: between its two kernels, on the same stream.
#include "communicator.h"

using namespace emu;

// Tells the rank of a device in the group of that name and how many ranks it has. Returns 0 if there is no such group.
EMU_API int emu_group(const char* name, int32_t device, uint32_t* rank, uint32_t* ranks) {
    const Communicator* c = find_communicator(name, device);
    if (c == nullptr) return 0;
    *rank = c->rank;
    *ranks = c->ranks;
    return 1;
}

// Every rank gives `bytes` to all, or, where `given` is not null, `given[i]` bytes to rank i and takes `taken[i]` from it, one
// behind the other. `what` is the operator and what each rank must say alike.
EMU_API int emu_exchange(void* stream, const char* group, int32_t device, const char* what, void* send, uint64_t bytes, void* receive,
                         void* given_sizes, void* taken_sizes) {
    const auto* given = static_cast<const uint64_t*>(given_sizes);
    const auto* taken = static_cast<const uint64_t*>(taken_sizes);
    Communicator* c = find_communicator(group, device);
    if (c == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, std::string("no group has the name ") + group, "ask the process group for it with get_hccl_comm_name");
    const auto in_a_row = [&](const uint64_t* sizes) {
        std::vector<Part> parts(c->ranks);
        for (uint64_t rank = 0, offset = 0; rank < c->ranks; offset += sizes[rank++]) parts[rank] = {sizes[rank], offset};
        return parts;
    };
    auto made = exchange(c, given == nullptr ? Collective::AllGather : Collective::AllToAll, HCCL_DATA_TYPE_INT8);
    made->what = what;
    made->taken = given == nullptr ? equal_parts(bytes, c->ranks) : in_a_row(taken);
    if (given != nullptr) made->given = in_a_row(given);
    made->send_bytes = given == nullptr ? bytes : end_of(made->given);
    made->receive_bytes = end_of(made->taken);
    return launch(std::move(made), send, receive, stream);
}
