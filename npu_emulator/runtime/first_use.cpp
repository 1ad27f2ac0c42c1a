// The first use of a communicator: its ranks wait for each other before there is a communicator, and that is watched as well.
//
// The processes of the ranks that have not come yet are known from the communicator of which this one is a part, or from the store
// through which torch_npu gives its ranks the root info (npu_emulator/rendezvous.py).
#include "communicator.h"

namespace emu {

Meeting::Meeting(const std::string& whose) {
    char stack[512] = "";
    if (const auto find_stack = python_stack.load()) {
        const Uninterrupted guard;
        find_stack(stack, sizeof stack);
    }
    Lock lock(state().mutex);
    open_own();
    launches_here();
    state().meeting[std::this_thread::get_id()] = static_cast<int32_t>(gettid());
    ++state().calls;
    goes_on();
    ++unwatched;
    if (own.board == nullptr) return;
    for (First& first : own.board->firsts) {
        if (first.used.load() != 0) continue;
        place_ = static_cast<int>(&first - own.board->firsts);
        snprintf(first.text, sizeof first.text, "device %d, %s: its first use%s%s", current_device(), whose.c_str(), stack[0] == 0 ? "" : " at ", stack);
        first.awaited.store(0);
        first.used.store(1);
        --unwatched;
        return;
    }
}

Meeting::~Meeting() {
    Lock lock(state().mutex);
    goes_on();
    if (place_ < 0) --unwatched;
    else if (own.process == getpid()) {
        told.erase(&own.board->firsts[place_]);
        own.board->firsts[place_].used.store(0);
    }
    state().meeting.erase(std::this_thread::get_id());
    ++state().calls;
}

std::string Meeting::look(const std::map<uint32_t, Attendee>& missing) {
    std::string ended;
    for (const auto& [rank, who] : missing)
        if (who.process != 0 && who.process != getpid() && birth_of(who.process) != who.born)
            ended = "rank " + std::to_string(rank) + " has ended (process " + std::to_string(who.process) + ")" + last_call_of(who.process, who.born);
    Lock lock(state().mutex);
    if (place_ < 0 || own.process != getpid()) return ended;
    First& first = own.board->firsts[place_];
    uint64_t awaited = 0;
    for (const auto& [rank, who] : missing) {
        if (rank >= kRanks) return ended;
        // A rank of this process may come from a thread that has not launched anything yet, and is not known to be blocked.
        first.members[rank] = who.process == getpid() ? Member{} : Member{who.process, who.board};
        awaited |= uint64_t{1} << rank;
    }
    first.awaited.store(awaited);
    const std::string found = find_deadlock(&first, lock);
    own.board->answered.store(asked_);
    asked_ = own.board->asked.load();
    deadlock_ = !found.empty();
    return deadlock_ ? found : ended;  // in this order, as in `await`
}

// The ranks of the communicator whose root info names a place, as far as they are known; and what it is for, where its name does
// not say that.
std::string find_ranks(const char* place, std::vector<Attendee>& ranks) {
    const auto find = python_ranks.load();
    char name[128] = "";
    if (find == nullptr) return "";
    std::vector<uint64_t> numbers(3 * ranks.size());
    {
        const Uninterrupted guard;
        if (find(place, name, sizeof name, numbers.data(), ranks.size()) == 0) return "";
    }
    for (size_t rank = 0; rank < ranks.size(); ++rank)
        ranks[rank] = {static_cast<int32_t>(numbers[3 * rank]), static_cast<int32_t>(numbers[3 * rank + 1]), numbers[3 * rank + 2]};
    return name;
}

}  // namespace emu

// For npu_emulator/rendezvous.py, whose store waits for a root info. Begin and end belong to one thread.
EMU_API void emu_board(uint64_t* process_file_born) {
    using namespace emu;
    Lock lock(state().mutex);
    const int32_t file = board_file();
    process_file_born[0] = static_cast<uint64_t>(getpid());
    process_file_born[1] = static_cast<uint64_t>(static_cast<uint32_t>(file));
    process_file_born[2] = birth_of(getpid());
}

EMU_API void* emu_begin_meeting(const char* whose) { return new emu::Meeting(whose); }

// Writes what is wrong and returns its code; or 0 if the rank, whose process may be 0 for unknown, may still come.
EMU_API int emu_look_for(void* meeting, uint32_t rank, const uint64_t* process_file_born, char* text, uint64_t capacity) {
    using namespace emu;
    const Attendee who{static_cast<int32_t>(process_file_born[0]), static_cast<int32_t>(process_file_born[1]), process_file_born[2]};
    const std::string found = static_cast<Meeting*>(meeting)->look({{rank, who}});
    snprintf(text, capacity, "%s", found.c_str());
    if (found.empty()) return ACL_SUCCESS;
    return static_cast<Meeting*>(meeting)->found_deadlock() ? ACL_ERROR_RT_FFTS_PLUS_TIMEOUT : ACL_ERROR_RT_SUSPECT_REMOTE_ERROR;
}

EMU_API void emu_end_meeting(void* meeting) { delete static_cast<emu::Meeting*>(meeting); }
