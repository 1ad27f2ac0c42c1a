// What each collective moves and computes. All go through rounds: every rank writes its part of a round into its window, all
// meet, and each takes what it needs from the windows of the others.
//
// Reductions add the ranks in order, 0 first, and round each sum to the dtype: the same bits on every rank and in every run.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "communicator.h"

namespace emu {

uint64_t size_of(HcclDataType type) {
    switch (type) {
        case HCCL_DATA_TYPE_INT128: return 16;
        case HCCL_DATA_TYPE_INT16: case HCCL_DATA_TYPE_UINT16: case HCCL_DATA_TYPE_FP16: case HCCL_DATA_TYPE_BFP16: return 2;
        case HCCL_DATA_TYPE_INT32: case HCCL_DATA_TYPE_UINT32: case HCCL_DATA_TYPE_FP32: return 4;
        case HCCL_DATA_TYPE_INT64: case HCCL_DATA_TYPE_UINT64: case HCCL_DATA_TYPE_FP64: return 8;
        default: return 1;
    }
}

// By number.
const std::map<uint32_t, const char*>& names_of_types() {
    static const std::map<uint32_t, const char*> names = {
        {0, "int8"}, {1, "int16"}, {2, "int32"}, {3, "float16"}, {4, "float32"}, {5, "int64"}, {6, "uint64"}, {7, "uint8"},
        {8, "uint16"}, {9, "uint32"}, {10, "float64"}, {11, "bfloat16"}, {12, "int128"}, {14, "hifloat8"}, {15, "float8_e4m3"}, {16, "float8_e5m2"}, {17, "float8_e8m0"}};
    return names;
}

bool is_type(HcclDataType type) { return names_of_types().count(type) != 0; }

const char* name_of(HcclDataType type) {
    const auto found = names_of_types().find(type);
    return found == names_of_types().end() ? "unknown dtype" : found->second;
}

const char* name_of(Collective kind) {
    static const char* const names[] = {"all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce", "scatter", "all_to_all", "barrier", "send_receive"};
    return names[static_cast<uint32_t>(kind)];
}

namespace {

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O3")
#endif

// -- reductions -----------------------------------------------------------------------------------------------------------

template <typename To, typename From>
To bits(From value) {
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}

struct BFloat16 {
    uint16_t raw;
    operator float() const { return bits<float>(uint32_t{raw} << 16); }
    static BFloat16 of(float value) {
        uint32_t word = bits<uint32_t>(value);
        if (std::isnan(value)) return {static_cast<uint16_t>(word >> 16 | 0x40)};
        word += 0x7FFF + (word >> 16 & 1);  // to nearest, ties to even
        return {static_cast<uint16_t>(word >> 16)};
    }
};

struct Float16 {
    uint16_t raw;
    operator float() const {
        const uint32_t sign = uint32_t{raw & 0x8000u} << 16, exponent = raw >> 10 & 31u, mantissa = raw & 0x3FFu;
        if (exponent == 0) return bits<float>(bits<uint32_t>(static_cast<float>(mantissa) * 0x1p-24f) | sign);
        const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
        return bits<float>(sign | wide << 23 | mantissa << 13);
    }
    static Float16 of(float value) {
        const uint32_t word = bits<uint32_t>(value);
        const auto sign = static_cast<uint16_t>(word >> 16 & 0x8000u);
        const float size = std::fabs(value);
        if (std::isnan(value)) return {static_cast<uint16_t>(sign | 0x7E00u)};
        if (size >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7C00u)};
        // Below 2^-14 steps are 2^-24; above, a step is 2^-10 of the power of two. rint rounds ties to even.
        if (size < 0x1p-14f) return {static_cast<uint16_t>(sign | static_cast<uint16_t>(std::rint(size * 0x1p24f)))};
        uint32_t magnitude = bits<uint32_t>(size);
        magnitude += 0xFFF + (magnitude >> 13 & 1);
        return {static_cast<uint16_t>(sign | ((magnitude >> 13) - (112u << 10)))};
    }
};

template <typename T>
T rounded(float value) { return T::of(value); }

// NaN wins in a minimum and a maximum, as torch's do.
template <typename T>
T combine(T left, T right, HcclReduceOp operation) {
    if constexpr (std::is_arithmetic_v<T>) {
        if constexpr (std::is_floating_point_v<T>) {
            if (operation >= HCCL_REDUCE_MAX && (std::isnan(left) || std::isnan(right))) return std::isnan(left) ? left : right;
        }
        using Wide = std::conditional_t<std::is_integral_v<T>, std::make_unsigned_t<std::conditional_t<std::is_integral_v<T>, T, int>>, T>;
        switch (operation) {
            // Unsigned, where an overflow wraps round as the device's does. uint64_t: shorter ones would become int.
            case HCCL_REDUCE_SUM:
                if constexpr (std::is_integral_v<T>) return static_cast<T>(uint64_t{static_cast<Wide>(left)} + static_cast<Wide>(right));
                else return left + right;
            case HCCL_REDUCE_PROD:
                if constexpr (std::is_integral_v<T>) return static_cast<T>(uint64_t{static_cast<Wide>(left)} * static_cast<Wide>(right));
                else return left * right;
            case HCCL_REDUCE_MAX: return left < right ? right : left;
            default: return right < left ? right : left;
        }
    } else {
        return rounded<T>(combine<float>(left, right, operation));
    }
}

// Each operation has a loop of its own, which the compiler turns into vector instructions.
template <typename T, HcclReduceOp operation>
void combine_all(char* into, const char* one, const char* other, uint64_t bytes) {
    auto* result = reinterpret_cast<T*>(into);
    const auto* left = reinterpret_cast<const T*>(one);
    const auto* right = reinterpret_cast<const T*>(other);
    for (uint64_t at = 0; at < bytes / sizeof(T); ++at) result[at] = combine(left[at], right[at], operation);
}

template <typename T>
void reduce_as(char* into, const char* one, const char* other, uint64_t bytes, HcclReduceOp operation) {
    switch (operation) {
        case HCCL_REDUCE_SUM: return combine_all<T, HCCL_REDUCE_SUM>(into, one, other, bytes);
        case HCCL_REDUCE_PROD: return combine_all<T, HCCL_REDUCE_PROD>(into, one, other, bytes);
        case HCCL_REDUCE_MAX: return combine_all<T, HCCL_REDUCE_MAX>(into, one, other, bytes);
        default: return combine_all<T, HCCL_REDUCE_MIN>(into, one, other, bytes);
    }
}

void reduce(char* into, const char* one, const char* other, uint64_t bytes, HcclDataType type, HcclReduceOp operation) {
    switch (type) {
        case HCCL_DATA_TYPE_INT8: return reduce_as<int8_t>(into, one, other, bytes, operation);
        case HCCL_DATA_TYPE_UINT8: return reduce_as<uint8_t>(into, one, other, bytes, operation);
        case HCCL_DATA_TYPE_INT16: return reduce_as<int16_t>(into, one, other, bytes, operation);
        case HCCL_DATA_TYPE_UINT16: return reduce_as<uint16_t>(into, one, other, bytes, operation);
        case HCCL_DATA_TYPE_INT32: return reduce_as<int32_t>(into, one, other, bytes, operation);
        case HCCL_DATA_TYPE_UINT32: return reduce_as<uint32_t>(into, one, other, bytes, operation);
        case HCCL_DATA_TYPE_INT64: return reduce_as<int64_t>(into, one, other, bytes, operation);
        case HCCL_DATA_TYPE_UINT64: return reduce_as<uint64_t>(into, one, other, bytes, operation);
        case HCCL_DATA_TYPE_FP32: return reduce_as<float>(into, one, other, bytes, operation);
        case HCCL_DATA_TYPE_FP64: return reduce_as<double>(into, one, other, bytes, operation);
        case HCCL_DATA_TYPE_FP16: return reduce_as<Float16>(into, one, other, bytes, operation);
        default: return reduce_as<BFloat16>(into, one, other, bytes, operation);
    }
}

// Adds what the ranks gave, in order, 0 first; `part(rank)` is where a rank's bytes lie.
template <typename Find>
void reduce_ranks(const Exchange& e, char* into, const Find& part, uint64_t bytes) {
    const uint32_t ranks = e.communicator->ranks;
    if (ranks == 1) memcpy(into, part(0), bytes);
    for (uint32_t rank = 1; rank < ranks; ++rank) reduce(into, rank == 1 ? part(0) : into, part(rank), bytes, e.type, e.operation);
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif

// -- rounds ---------------------------------------------------------------------------------------------------------------

// The part of a range that round `round` moves, in steps of `step` bytes.
struct Slice {
    uint64_t offset = 0, bytes = 0;
    Slice(uint64_t total, uint64_t round, uint64_t step) {
        offset = std::min(total, round * step);
        bytes = std::min(step, total - offset);
    }
};

// The bytes that a rank gives to another one, and takes from it.
uint64_t gives(const Exchange& e, uint32_t to) {
    const Communicator& c = *e.communicator;
    switch (e.kind) {
        case Collective::AllGather: return e.taken[c.rank].bytes;
        case Collective::ReduceScatter: case Collective::AllToAll: return e.given[to].bytes;
        case Collective::Scatter: return c.rank == e.root ? e.given[to].bytes : 0;
        case Collective::Barrier: case Collective::SendReceive: return 0;
        default: return e.given[0].bytes;
    }
}

uint64_t takes(const Exchange& e, uint32_t from) {
    const Communicator& c = *e.communicator;
    switch (e.kind) {
        case Collective::AllGather: case Collective::AllToAll: return e.taken[from].bytes;
        case Collective::ReduceScatter: return e.given[c.rank].bytes;
        case Collective::Scatter: return from == e.root ? e.taken[0].bytes : 0;
        case Collective::Barrier: case Collective::SendReceive: return 0;
        default: return e.given[0].bytes;
    }
}

// "4 bytes", or "4, 8 and so on" where the parts are unequal.
std::string sizes_of(const uint64_t* amounts, uint32_t ranks) {
    if (std::all_of(amounts, amounts + ranks, [&](uint64_t bytes) { return bytes == amounts[0]; })) return std::to_string(amounts[0]);
    std::string text;
    for (uint32_t rank = 0; rank < ranks; ++rank) text += (rank == 0 ? "" : "+") + std::to_string(amounts[rank]);
    return text;
}

}  // namespace

std::string describe(const Header& header, const uint64_t* amounts, uint32_t ranks) {
    const auto kind = static_cast<Collective>(header.kind);
    std::string text = header.what[0] == 0 ? name_of(kind) : header.what;
    if (header.number != 0) text += " number " + std::to_string(header.number);
    if (amounts != nullptr && kind != Collective::Barrier && (header.what[0] == 0 || kind == Collective::AllToAll))
        text += " of " + sizes_of(kind == Collective::Scatter ? amounts + ranks : amounts, ranks) + " bytes of " + name_of(static_cast<HcclDataType>(header.type));
    if (amounts != nullptr && kind == Collective::AllToAll) text += ", taking " + sizes_of(amounts + ranks, ranks);
    if (kind == Collective::AllReduce || kind == Collective::Reduce || kind == Collective::ReduceScatter) {
        static const char* const operations[] = {"sum", "product", "maximum", "minimum"};
        text += std::string(" (") + operations[header.operation & 3] + ")";
    }
    if (kind == Collective::Broadcast || kind == Collective::Reduce || kind == Collective::Scatter)
        text += " with root " + std::to_string(header.root);
    if (header.line[0] != 0) text += std::string(" at ") + header.line;
    return text + ", on stream " + std::to_string(header.stream);
}

Header header_of(const Exchange& e, uint64_t number) {
    Header header{};
    header.kind = static_cast<uint32_t>(e.kind);
    header.type = e.type;
    header.operation = e.operation;
    header.root = e.root;
    header.number = number;
    header.stream = e.stream;
    snprintf(header.what, sizeof header.what, "%s", e.what.c_str());
    snprintf(header.line, sizeof header.line, "%s", e.line.c_str());
    return header;
}

namespace {

bool agree(const Header& one, const Header& other) {
    return std::tie(one.kind, one.type, one.operation, one.root, one.number) ==
               std::tie(other.kind, other.type, other.operation, other.root, other.number) &&
           strcmp(one.what, other.what) == 0;
}

class Rounds {
  public:
    explicit Rounds(const Exchange& exchange) : e_(exchange), c_(*exchange.communicator) {}

    // `put(round, window)` writes this rank's window; `get(round, windows)` reads those of all, as `windows(rank)`.
    template <typename Put, typename Get>
    aclError run(uint64_t rounds, const Put& put, const Get& get) {
        uint64_t total = std::max<uint64_t>(1, rounds);
        for (uint64_t round = 0; round < total; ++round) {
            const uint32_t parity = c_.round & 1;
            put(round, c_.window(c_.rank, parity));
            if (round == 0) show(parity, rounds);
            aclError status = meet(c_);
            if (status == ACL_SUCCESS && round == 0) status = compare(parity, total);
            if (status != ACL_SUCCESS) return status;
            get(round, [&](uint32_t rank) { return c_.window(rank, parity); });
        }
        return ACL_SUCCESS;
    }

  private:
    const Exchange& e_;
    Communicator& c_;

    void show(uint32_t parity, uint64_t rounds) const {
        Header& header = c_.seat(c_.rank).header[parity];
        header = header_of(e_, c_.number);
        header.rounds = rounds;
        for (uint32_t rank = 0; rank < c_.ranks; ++rank) {
            c_.amounts(c_.rank, parity)[rank] = gives(e_, rank);
            c_.amounts(c_.rank, parity)[c_.ranks + rank] = takes(e_, rank);
        }
    }

    // Refuses different collectives; sets the number of rounds of the rank with the most.
    aclError compare(uint32_t parity, uint64_t& total) const {
        const Header& mine = c_.seat(c_.rank).header[parity];
        bool same = true;
        for (uint32_t rank = 0; rank < c_.ranks; ++rank) {
            const Header& header = c_.seat(rank).header[parity];
            same = same && agree(mine, header);
            total = std::max(total, header.rounds);
            for (uint32_t other = 0; other < c_.ranks; ++other)
                same = same && c_.amounts(rank, parity)[other] == c_.amounts(other, parity)[c_.ranks + rank];
        }
        if (same) return ACL_SUCCESS;
        std::string text = "the ranks of " + c_.name + " called different collectives:";
        for (uint32_t rank = 0; rank < c_.ranks; ++rank)
            text += "\n  rank " + std::to_string(rank) + ": " + describe(c_.seat(rank).header[parity], c_.amounts(rank, parity), c_.ranks);
        const aclError met = meet(c_);  // so that every rank has read every header before one leaves
        return met != ACL_SUCCESS ? met : fail_communicator(c_, HCCL_E_PARA, ACL_ERROR_RT_PARAM_INVALID, text);
    }
};

uint64_t rounds_for(uint64_t bytes, uint64_t step) { return (bytes + step - 1) / step; }

uint64_t longest(const std::vector<Part>& parts) {
    uint64_t most = 0;
    for (const Part& part : parts) most = std::max(most, part.bytes);
    return most;
}

// AllReduce and Reduce.
aclError reduce_whole(const Exchange& e, bool wanted) {
    const uint64_t total = e.given[0].bytes;
    return Rounds(e).run(
        rounds_for(total, kWindow),
        [&](uint64_t round, char* window) {
            const Slice slice(total, round, kWindow);
            memcpy(window, e.send + slice.offset, slice.bytes);
        },
        [&](uint64_t round, const auto& windows) {
            if (!wanted) return;
            const Slice slice(total, round, kWindow);
            reduce_ranks(e, e.receive + slice.offset, windows, slice.bytes);
        });
}

aclError broadcast(const Exchange& e) {
    const bool root = e.communicator->rank == e.root;
    const uint64_t total = e.given[0].bytes;
    return Rounds(e).run(
        rounds_for(total, kWindow),
        [&](uint64_t round, char* window) {
            const Slice slice(total, round, kWindow);
            if (root) memcpy(window, e.send + slice.offset, slice.bytes);
        },
        [&](uint64_t round, const auto& windows) {
            const Slice slice(total, round, kWindow);
            if (!root) memcpy(e.receive + slice.offset, windows(e.root), slice.bytes);
        });
}

aclError all_gather(const Exchange& e) {
    const Communicator& c = *e.communicator;
    const uint64_t own = e.taken[c.rank].bytes;
    return Rounds(e).run(
        rounds_for(own, kWindow),
        [&](uint64_t round, char* window) {
            const Slice slice(own, round, kWindow);
            memcpy(window, e.send + slice.offset, slice.bytes);
        },
        [&](uint64_t round, const auto& windows) {
            for (uint32_t rank = 0; rank < c.ranks; ++rank) {
                const Slice slice(e.taken[rank].bytes, round, kWindow);
                memcpy(e.receive + e.taken[rank].offset + slice.offset, windows(rank), slice.bytes);
            }
        });
}

// ReduceScatter, Scatter and AllToAll: a window has a part for each destination.
uint64_t step_of(const Communicator& c) { return kWindow / c.ranks / 64 * 64; }

aclError put_parts(const Exchange& e, uint64_t rounds, const std::function<void(uint64_t, const std::function<const char*(uint32_t)>&)>& get, bool gives) {
    const Communicator& c = *e.communicator;
    const uint64_t step = step_of(c);
    return Rounds(e).run(
        rounds,
        [&](uint64_t round, char* window) {
            for (uint32_t to = 0; gives && to < c.ranks; ++to) {
                const Slice slice(e.given[to].bytes, round, step);
                memcpy(window + to * step, e.send + e.given[to].offset + slice.offset, slice.bytes);
            }
        },
        [&](uint64_t round, const auto& windows) { get(round, [&](uint32_t from) { return windows(from) + c.rank * step; }); });
}

aclError reduce_scatter(const Exchange& e) {
    const Communicator& c = *e.communicator;
    const uint64_t step = step_of(c), own = e.given[c.rank].bytes;
    return put_parts(e, rounds_for(longest(e.given), step), [&](uint64_t round, const auto& part) {
        const Slice slice(own, round, step);
        reduce_ranks(e, e.receive + slice.offset, part, slice.bytes);
    }, true);
}

aclError scatter(const Exchange& e) {
    const Communicator& c = *e.communicator;
    const uint64_t step = step_of(c), own = e.taken[0].bytes;
    return put_parts(e, rounds_for(own, step), [&](uint64_t round, const auto& part) {
        const Slice slice(own, round, step);
        memcpy(e.receive + slice.offset, part(e.root), slice.bytes);
    }, c.rank == e.root);
}

aclError all_to_all(const Exchange& e) {
    const Communicator& c = *e.communicator;
    const uint64_t step = step_of(c);
    return put_parts(e, rounds_for(std::max(longest(e.given), longest(e.taken)), step), [&](uint64_t round, const auto& part) {
        for (uint32_t from = 0; from < c.ranks; ++from) {
            const Slice slice(e.taken[from].bytes, round, step);
            memcpy(e.receive + e.taken[from].offset + slice.offset, part(from), slice.bytes);
        }
    }, true);
}

// -- messages -------------------------------------------------------------------------------------------------------------

// "send number 3 of 16 bytes of float32 to rank 1"
std::string describe_message(const HcclSendRecvItem& item) {
    return std::string(item.sendRecvType == HCCL_SEND ? "send of " : "receive of ") + std::to_string(item.count * size_of(item.dataType)) + " bytes of " +
           name_of(item.dataType) + (item.sendRecvType == HCCL_SEND ? " to rank " : " from rank ") + std::to_string(item.remoteRank);
}

// Moves the next part of one message if its mailbox allows it; true once the whole message has passed. A send has passed when
// the other rank has taken its last part, as on hardware, where no memory holds a message between two ranks.
bool move_part(const Communicator& c, const Exchange& e, const HcclSendRecvItem& item, uint64_t& done, bool& moved, std::string& wrong) {
    const bool sends = item.sendRecvType == HCCL_SEND;
    const uint32_t from = sends ? c.rank : item.remoteRank, to = sends ? item.remoteRank : c.rank;
    Mailbox& box = c.mailbox(from, to);
    const uint64_t total = item.count * size_of(item.dataType);
    if (sends && done == std::max<uint64_t>(1, rounds_for(total, kMessage))) return box.full.load() == 0;
    if ((box.full.load() != 0) == sends) return false;
    const Slice slice(total, done, kMessage);
    auto* buffer = static_cast<char*>(item.buf) + slice.offset;
    if (sends) {
        box.bytes = total;
        box.type = item.dataType;
        box.stream = e.stream;
        snprintf(box.line, sizeof box.line, "%s", e.line.c_str());
        memcpy(c.message(from, to), buffer, slice.bytes);
    } else {
        if (box.bytes != total || box.type != item.dataType) {
            wrong = "rank " + std::to_string(from) + " of " + c.name + " sends " + std::to_string(box.bytes) + " bytes of " +
                    name_of(static_cast<HcclDataType>(box.type)) + " (" + box.line + ", on stream " + std::to_string(box.stream) + "), and rank " +
                    std::to_string(to) + " receives " + std::to_string(total) + " bytes of " + name_of(item.dataType) + " (" + e.line +
                    ", on stream " + std::to_string(e.stream) + ")";
            return false;
        }
        memcpy(buffer, c.message(from, to), slice.bytes);
    }
    box.full.store(sends ? 1 : 0);
    note_moved(c);
    ring(c.seat(item.remoteRank).bell);
    moved = true;
    ++done;
    return !sends && slice.offset + slice.bytes >= total;
}

// All messages of a batch make progress in turn, so that two ranks may send to each other. Messages between the same two ranks
// keep their order.
aclError send_receive(const Exchange& e) {
    Communicator& c = *e.communicator;
    std::vector<uint64_t> done(e.messages.size(), 0);
    std::vector<bool> finished(e.messages.size(), false);
    std::vector<uint32_t> seen_moves(c.ranks);
    while (true) {
        bool moved = false, later = false;
        Awaited awaited{{}, &seen_moves};
        std::set<std::pair<uint32_t, uint32_t>> busy;
        for (uint32_t rank = 0; rank < c.ranks; ++rank) seen_moves[rank] = c.seat(rank).moved.load();
        for (size_t at = 0; at < e.messages.size(); ++at) {
            const HcclSendRecvItem& item = e.messages[at];
            if (finished[at]) continue;
            if (!busy.emplace(item.sendRecvType, item.remoteRank).second) {
                later = true;
                continue;
            }
            std::string wrong;
            finished[at] = move_part(c, e, item, done[at], moved, wrong);
            if (!wrong.empty()) return fail_communicator(c, HCCL_E_PARA, ACL_ERROR_RT_PARAM_INVALID, wrong);
            if (!finished[at]) awaited.ranks.set(item.remoteRank);
        }
        if (moved || (awaited.ranks.none() && later)) continue;
        if (awaited.ranks.none()) return ACL_SUCCESS;
        const aclError status = await(c, awaited, c.seat(c.rank).bell, [&] {
            for (uint32_t rank = 0; rank < c.ranks; ++rank)
                if (c.seat(rank).moved.load() != seen_moves[rank]) return true;
            return false;
        });
        if (status != ACL_SUCCESS) return status;
    }
}

}  // namespace

namespace {

// A device that has failed does not go on with what is queued, before the program has seen the failure.
std::string why_stopped(int32_t device) {
    Lock lock(state().mutex);
    return state().failures[device].stopped;
}

}  // namespace

// A collective of this rank, for a person.
std::string describe(const Communicator& c, const Exchange& e) {
    std::string text = "device " + std::to_string(c.device) + ", rank " + std::to_string(c.rank) + " of " + c.name + ": ";
    if (e.kind == Collective::SendReceive) {
        for (const HcclSendRecvItem& item : e.messages) text += (&item == &e.messages.front() ? "" : " and ") + describe_message(item);
        return text + (e.line.empty() ? "" : " at " + e.line) + ", on stream " + std::to_string(e.stream);
    }
    std::vector<uint64_t> amounts(2 * c.ranks);
    for (uint32_t rank = 0; rank < c.ranks; ++rank) {
        amounts[rank] = gives(e, rank);
        amounts[c.ranks + rank] = takes(e, rank);
    }
    return text + describe(header_of(e, c.number), amounts.data(), c.ranks);
}

aclError run_exchange(const Exchange& e) {
    Communicator& c = *e.communicator;
    if (e.kind != Collective::SendReceive) ++c.number;
    if (c.failed.load() != HCCL_SUCCESS)
        return fail_communicator(c, HCCL_E_REMOTE, ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, "the communicator " + c.name + " has failed before: " + c.failure);
    if (const std::string cause = why_stopped(c.device); !cause.empty()) return fail_communicator(c, HCCL_E_REMOTE, ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, cause);
    for (const auto& [pointer, bytes] : {std::pair<const char*, uint64_t>{e.send, e.send_bytes}, {e.receive, e.receive_bytes}})
        if (bytes != 0 && is_outside_allocations(pointer, bytes))
            return fail_communicator(c, HCCL_E_RUNTIME, ACL_ERROR_RT_MODEL_EXECUTE, outside_allocations(name_of(e.kind), pointer, bytes));
    aclError status = ACL_SUCCESS;
    switch (e.kind) {
        case Collective::AllReduce: status = reduce_whole(e, true); break;
        case Collective::Reduce: status = reduce_whole(e, c.rank == e.root); break;
        case Collective::Broadcast: status = broadcast(e); break;
        case Collective::AllGather: status = all_gather(e); break;
        case Collective::ReduceScatter: status = reduce_scatter(e); break;
        case Collective::Scatter: status = scatter(e); break;
        case Collective::AllToAll: status = all_to_all(e); break;
        case Collective::SendReceive: status = send_receive(e); break;
        case Collective::Barrier: status = Rounds(e).run(1, [](uint64_t, char*) {}, [](uint64_t, const auto&) {}); break;
    }
    if (e.receive != nullptr) clear_unwritten(e.receive, e.receive_bytes);
    for (const HcclSendRecvItem& item : e.messages)
        if (item.sendRecvType == HCCL_RECV) clear_unwritten(item.buf, item.count * size_of(item.dataType));
    return status;
}

}  // namespace emu
