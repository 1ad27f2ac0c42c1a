// The first use of a communicator: its ranks wait for each other before there is a communicator, and that is watched as well.
//
// The processes of the ranks that have not come yet are known from the communicator of which this one is a part, or from the store
// through which torch_npu gives its ranks the root info (npu_emulator/rendezvous.py). Elsewhere a rank is any process of the program
// (relatives.cpp).
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
        first.awaited.store({});
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

namespace {

// Why the ranks of unknown processes do not come, if too few processes live for that; else empty, with those that may be ranks.
std::string end_of_unknown(const Company& company, std::vector<Attendee>& others) {
    std::string ended;
    size_t alive = 0;
    for (const Attendee& each : find_processes(company.ranks, company.by_table)) {
        const bool joined = each.process == getpid() || company.joined.count(each.process) != 0;
        if (each.process == getpid() || birth_of(each.process) == each.born) {
            ++alive;
            if (!joined) others.push_back(each);
        } else {
            ended += (ended.empty() ? "process " : "; process ") + std::to_string(each.process) + " has ended" + last_call_of(each.process, each.born);
        }
    }
    return alive >= company.ranks && !others.empty() ? "" : ended;
}

}  // namespace

std::string Meeting::look(const std::map<uint32_t, Attendee>& missing, const Company& company) {
    std::string ended;
    std::vector<Attendee> others;
    for (const auto& [rank, who] : missing)
        if (who.process != 0 && who.process != getpid() && birth_of(who.process) != who.born)
            ended = "rank " + std::to_string(rank) + " has ended (process " + std::to_string(who.process) + ")" + last_call_of(who.process, who.born);
    if (std::any_of(missing.begin(), missing.end(), [](const auto& item) { return item.second.process == 0; })) {
        const std::string gone = end_of_unknown(company, others);
        if (!gone.empty() && ended.empty()) ended = "a rank has not come, and too few processes of this program are left: " + gone;
    }
    Lock lock(state().mutex);
    if (place_ < 0 || own.process != getpid()) return ended;
    First& first = own.board->firsts[place_];
    RankSet awaited;
    for (const auto& [rank, who] : missing) {
        // A rank of this process may come from a thread that has not launched anything yet, and is not known to be blocked.
        first.members[rank] = who.process == getpid() ? Member{} : Member{who.process, who.board};
        awaited.set(rank);
    }
    first.awaited.store(awaited);
    first.others = 0;
    for (const Attendee& each : others)
        if (first.others < kRanks) first.candidates[first.others++] = {each.process, each.board};
    const std::string found = find_deadlock(&first, lock);
    own.board->answered.store(asked_);
    asked_ = own.board->asked.load();
    deadlock_ = !found.empty();
    return deadlock_ ? found : ended;  // in this order, as in `await`
}

// The ranks of the communicator of a root info (name_of_root), as far as they are known; and what it is for, where its name does
// not say that.
std::string find_ranks(const char* root, std::vector<Attendee>& ranks) {
    const auto find = python_ranks.load();
    char name[128] = "";
    if (find == nullptr) return "";
    std::vector<uint64_t> numbers(3 * ranks.size());
    {
        const Uninterrupted guard;
        if (find(root, name, sizeof name, numbers.data(), ranks.size()) == 0) return "";
    }
    for (size_t rank = 0; rank < ranks.size(); ++rank)
        ranks[rank] = {static_cast<int32_t>(numbers[3 * rank]), static_cast<int32_t>(numbers[3 * rank + 1]), numbers[3 * rank + 2]};
    return name;
}

}  // namespace emu

// How other processes find this one.
EMU_API void emu_board(uint64_t* process_file_born) {
    using namespace emu;
    Lock lock(state().mutex);
    const int32_t file = board_file();
    process_file_born[0] = static_cast<uint64_t>(getpid());
    process_file_born[1] = static_cast<uint64_t>(static_cast<uint32_t>(file));
    process_file_born[2] = birth_of(getpid());
}
