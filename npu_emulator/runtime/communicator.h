// A communicator of HCCL: ranks that exchange bytes through memory that their processes share.
#pragma once

#include <atomic>
#include <bitset>
#include <functional>

#include "emulator.h"
#include "hccl.h"

namespace emu {

enum class Collective : uint32_t {
    AllReduce, Broadcast, AllGather, ReduceScatter, Reduce, Scatter, AllToAll, Barrier, SendReceive,
};

// What a rank gives to and takes from one other rank, in the forms with unequal parts.
struct Part {
    uint64_t bytes = 0, offset = 0;
};

// One call of a collective on one rank.
struct Exchange {
    struct Communicator* communicator = nullptr;
    Collective kind = Collective::Barrier;
    HcclDataType type = HCCL_DATA_TYPE_INT8;
    HcclReduceOp operation = HCCL_REDUCE_SUM;
    uint32_t root = 0;
    const char* send = nullptr;
    char* receive = nullptr;
    std::vector<Part> given, taken;          // by rank; AllReduce, Broadcast and Reduce use the first one
    std::vector<HcclSendRecvItem> messages;  // SendReceive
    std::string line;                        // the program's stack, innermost line first
    int32_t stream = 0;
    bool open = false;                       // its group of calls has not ended; guarded by the runtime's lock
    std::string what;                        // of a fused operator: its name, and what all ranks must give alike
    uint64_t send_bytes = 0, receive_bytes = 0;  // the memory that is read and written
};

// A collective, as a rank shows it to the others.
struct Header {
    uint32_t kind, type, operation, root;
    uint64_t number, rounds;
    int32_t stream;
    char what[232], line[512];
};

constexpr uint64_t kWindow = uint64_t{8} << 20;   // bytes of one round
constexpr uint64_t kMessage = uint64_t{1} << 18;  // bytes of one part of a message

enum class Progress : uint32_t { Called, Begun, Finished };

// One rank's part of the shared memory. Rounds alternate between two headers and two windows: a rank writes one only after
// all ranks have arrived at the round after its last use.
struct Seat {
    std::atomic<int32_t> process;      // 0 before the rank has joined
    std::atomic<uint64_t> born;        // tells that process from a later one of the same number
    std::atomic<uint32_t> left;        // the rank has destroyed its communicator, or the communicator has failed there
    std::atomic<uint32_t> bell;        // rung for the rank's engine
    std::atomic<uint32_t> waiters;     // ranks that wait for this one
    std::atomic<uint32_t> arrived;     // rounds that the rank has reached
    std::atomic<uint32_t> moved;       // parts of messages that the rank has moved
    int32_t board;                     // the file of its process's board (deadlocks.cpp)
    int32_t device;
    std::atomic<uint64_t> part;        // 1 + the number of the part of the communicator that is being made at `place`
    char place[64];
    char failure[1024];                // why its communicator has failed
    Header header[2];
    Header last;                       // the last call: what remains of a process that is killed
    std::atomic<uint64_t> turn;        // of that call among its process's calls; 0 before the first
    std::atomic<Progress> progress;    // of that call
};

// A message between two ranks, in parts.
struct Mailbox {
    std::atomic<uint32_t> full;
    uint64_t bytes;  // of the whole message
    uint32_t type;
    int32_t stream;
    char line[512];
};

constexpr uint32_t kRanks = 1024;  // that a communicator may have

using RankSet = std::bitset<kRanks>;

// What an engine waits for, as the board shows it.
struct Awaited {
    RankSet ranks;
    const std::vector<uint32_t>* seen = nullptr;  // messages: how many parts each rank had moved before the wait
};

// The process of a rank, and where its board is; `process` is 0 if that is unknown.
struct Attendee {
    int32_t process = 0, board = -1;
    uint64_t born = 0;
};

// Of a communicator that is being made.
struct Company {
    uint32_t ranks = 0;
    bool by_table = false;
    std::set<int32_t> joined = {};  // processes
};

// A thread that waits for ranks of a communicator that is being made (first_use.cpp).
class Meeting {
  public:
    // `whose` names the communicator and this rank of it, for a person. With the runtime's lock free, as everywhere here.
    explicit Meeting(const std::string& whose);
    ~Meeting();
    Meeting(const Meeting&) = delete;
    // What is wrong; empty if the missing ranks may still come. `missing` was found out after the last look.
    std::string look(const std::map<uint32_t, Attendee>& missing, const Company& company);
    bool found_deadlock() const { return deadlock_; }

  private:
    int place_ = -1;  // on the board
    uint32_t asked_ = 0;
    bool deadlock_ = false;
};

struct Communicator {
    std::string name;
    uint64_t id = 0;  // the same on every rank
    uint32_t ranks = 0, rank = 0;
    int32_t device = 0;
    char* memory = nullptr;
    uint64_t size = 0;
    std::thread engine;
    std::atomic<bool> stop{false};
    std::atomic<uint32_t> failed{HCCL_SUCCESS};
    std::string failure;  // why, once it has failed
    struct Job {
        std::shared_ptr<const Exchange> exchange;
        AwayRef away;
        std::function<void(aclError)> finished;
    };
    std::deque<Job> jobs;  // guarded by the runtime's lock
    uint64_t number = 0;   // collectives so far; only the engine uses it
    uint32_t round = 0;    // likewise
    const Exchange* running = nullptr;  // likewise
    AwayRef away;                       // of that; likewise
    bool working = false;  // the engine runs a job and waits for no rank; guarded by the runtime's lock

    Seat& seat(uint32_t of) const;
    char* window(uint32_t of, uint32_t parity) const;
    // The bytes that a rank gives to each other one, and then those that it takes from each.
    uint64_t* amounts(uint32_t of, uint32_t parity) const;
    Mailbox& mailbox(uint32_t from, uint32_t to) const;
    char* message(uint32_t from, uint32_t to) const;
};

uint64_t size_of(HcclDataType type);
const char* name_of(HcclDataType type);
bool is_type(HcclDataType type);
const char* name_of(Collective kind);

// meeting.cpp
// Finds the processes of the ranks, as far as it can; returns what the communicator is for, where its name does not say that.
using FindRanks = std::function<std::string(std::vector<Attendee>& ranks)>;
HcclResult join(const char* place, const Company& company, uint32_t rank, std::string name, Communicator** made, const FindRanks& find = nullptr);
HcclResult join_all(const std::vector<int32_t>& devices, Communicator** made);
HcclResult join_part(Communicator& parent, const std::vector<uint32_t>& members, uint64_t number, uint32_t rank, std::string name, Communicator** made);
HcclResult join_table(const char* path, uint32_t rank, Communicator** made);
HcclResult leave(Communicator* communicator);
bool open_root(char* place, size_t capacity);
void close_root(const char* place);
constexpr size_t kPlace = 64;  // the longest text of a place
bool make_root(char* root);
std::string name_of_root(const char* root);

// communicator.cpp
aclError fail_communicator(Communicator& c, HcclResult result, aclError code, const std::string& text);
aclError meet(Communicator& c);
// The communicator of a name on a device; null if there is none.
Communicator* find_communicator(const std::string& name, int32_t device);
void ring(std::atomic<uint32_t>& bell);
// With the runtime's lock held. Keeps what this rank's program or device does now.
void note_call(const Exchange& e, uint64_t number, Progress progress);
// What a process did last, as its communicators with this one know it.
std::string last_call_of(int32_t process, uint64_t born);
// Waits until `ready()` or an error, for something that the awaited ranks do.
aclError await(Communicator& c, const Awaited& awaited, std::atomic<uint32_t>& word, const std::function<bool()>& ready);

// standstill.cpp
void wait_until_held(Communicator& c);

// relatives.cpp
void note_process();
std::vector<Attendee> find_processes(uint32_t ranks, bool by_table);

// first_use.cpp
std::string find_ranks(const char* place, std::vector<Attendee>& ranks);

// collectives.cpp
aclError run_exchange(const Exchange& exchange);
std::string describe(const Communicator& c, const Exchange& exchange);
Header header_of(const Exchange& e, uint64_t number);
// For a person; without sizes if `amounts` is null, and without a number if that is 0.
std::string describe(const Header& header, const uint64_t* amounts, uint32_t ranks);

// deadlocks.cpp
void show_on_board(const Communicator& c);
void hide_from_board(const Communicator& c);
int32_t board_file();
void show_waiting(const Communicator& c, const Awaited& awaited);
void show_working(const Communicator& c);
// With the runtime's lock held: what is wrong if this process and others wait for each other; else empty.
std::string find_deadlock(const Communicator& c, Lock& lock);
void note_moved(const Communicator& c);
void note_finished(const Communicator& c, const Exchange& e);
bool engines_wait();
bool is_engine(int32_t thread);

}  // namespace emu
