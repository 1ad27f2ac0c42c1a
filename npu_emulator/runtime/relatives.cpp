// The processes of a program, for a rank that waits for ranks which nobody has named: by HCCL's C interface, or by a rank table.
//
// Each process that uses a device writes itself into memory of the first emulated process, whose place the others find in their
// environment (npu_emulator/children.py). A rank that has not come is one of them, if the program says how many processes it has
// and as many children of one parent have used a device. Then nobody else can come: if all others have ended or wait for each
// other, the wait is of no use.
#include "communicator.h"

namespace emu {
namespace {

constexpr uint32_t kRelatives = 4096;
constexpr const char* kName = "/memfd:npu_emulator_relatives";

struct Relative {
    std::atomic<int32_t> process;  // 0: not written yet
    int32_t board, parent, number;  // the number that the program gave it (RANK), or -1
    uint64_t born;
};

struct Relatives {
    std::atomic<uint32_t> count;
    Relative each[kRelatives];
};

Relatives* relatives = nullptr;   // guarded by the runtime's lock, as all here
int32_t registered = 0;           // the process for which that is; a forked one writes itself anew
std::set<uint32_t> ended_before;  // places of processes that this one never met
uint32_t declared = 0;            // the number of processes, as the program told torch

uint32_t number_in(const char* variable, uint32_t otherwise) {
    const char* text = getenv(variable);
    char* end = nullptr;
    const unsigned long number = text == nullptr ? 0 : strtoul(text, &end, 10);
    return text == nullptr || end == text || *end != 0 ? otherwise : static_cast<uint32_t>(number);
}

Relatives* find_relatives() {
    if (relatives != nullptr) return relatives;
    const char* place = getenv("NPU_EMULATOR_RELATIVES");
    char link[64] = "";
    if (place == nullptr || readlink(place, link, sizeof link - 1) < 0 || strncmp(link, kName, strlen(kName)) != 0) return nullptr;  // that process has ended
    const int file = open(place, O_RDWR | O_CLOEXEC);
    if (file < 0) return nullptr;
    void* memory = ftruncate(file, sizeof(Relatives)) != 0 ? MAP_FAILED : mmap(nullptr, sizeof(Relatives), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return relatives = memory == MAP_FAILED ? nullptr : static_cast<Relatives*>(memory);
}

bool lives(const Relative& each) { return birth_of(each.process.load()) == each.born; }

}  // namespace

// Called where a process chooses a device.
void note_process() {
    static std::atomic<int32_t> noted{0};
    if (noted.load() == getpid()) return;
    Lock lock(state().mutex);
    if (noted.exchange(getpid()) == getpid() || find_relatives() == nullptr) return;
    const uint32_t place = relatives->count.fetch_add(1);
    if (place >= kRelatives) return;
    ended_before.clear();
    for (uint32_t other = 0; other < place; ++other)
        if (!lives(relatives->each[other])) ended_before.insert(other);
    Relative& mine = relatives->each[place];
    mine.board = board_file();
    mine.parent = getppid();
    mine.number = static_cast<int32_t>(number_in("RANK", UINT32_MAX));
    mine.born = birth_of(getpid());
    registered = getpid();
    mine.process.store(getpid());
}

// The processes that may be ranks of a communicator of so many ranks; empty if there may be others.
std::vector<Attendee> find_processes(uint32_t ranks, bool by_table) {
    Lock lock(state().mutex);
    const uint32_t processes = by_table ? ranks : std::max({declared, number_in("WORLD_SIZE", 0), number_in("RANK_SIZE", 0)});
    if (registered != getpid() || processes < ranks || relatives->count.load() > kRelatives) return {};
    std::vector<Attendee> found;
    std::set<int64_t> different;  // a rank may have been started again
    for (uint32_t place = 0; place < relatives->count.load(); ++place) {
        const Relative& each = relatives->each[place];
        if (each.process.load() == 0 || each.parent != getppid() || ended_before.count(place) != 0) continue;
        found.push_back({each.process.load(), each.board, each.born});
        different.insert(each.number >= 0 ? each.number : -int64_t{each.process.load()});
    }
    return different.size() < processes ? std::vector<Attendee>() : found;
}

}  // namespace emu

// How many processes the program says that it has.
EMU_API void emu_declare_processes(uint32_t number) {
    emu::Lock lock(emu::state().mutex);
    emu::declared = std::max(emu::declared, number);
}
