// Ranks that wait for each other, found at once.
//
// Each process shows on a board, shared memory that the others may read, whether it is blocked (no task can run, and every
// thread that launches waits for the device) and for which ranks each of its communicators waits. A process stays blocked for
// ever if each of its waiting collectives lacks a rank of a process that stays blocked for ever. Of such processes those that wait
// for each other, in a circle over any number of communicators, are a deadlock. Who only waits for them is told nothing: a program
// may go on after the error. Nothing here depends on time: the boards are read again, and a process that has gone on meanwhile
// has another number.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "communicator.h"

namespace emu {
namespace {

constexpr uint32_t kCommunicators = 256, kMeetings = 8;  // of a process; with more it is not watched

struct Member {
    int32_t process, board;
};

// The ranks for which a wait waits, as other processes read them.
class ShownRanks {
  public:
    void store(const RankSet& ranks) {
        uint32_t words[kRanks / 32];
        bool same = any() == ranks.any();
        for (uint32_t at = 0; at < kRanks / 32; ++at) {
            words[at] = static_cast<uint32_t>((ranks >> 32 * at & RankSet(UINT32_MAX)).to_ulong());
            same = same && words_[at].load() == words[at];
        }
        if (same) return;  // who reads a wait that is shown again must not find it gone
        any_.store(0);
        for (uint32_t at = 0; at < kRanks / 32; ++at) words_[at].store(words[at]);
        any_.store(ranks.any());
    }
    bool any() const { return any_.load() != 0; }
    std::vector<uint32_t> all() const {
        std::vector<uint32_t> found;
        for (uint32_t first = 0; any() && first < kRanks; first += 32)
            for (uint32_t word = words_[first / 32].load(), rank = first; word != 0; word >>= 1, ++rank)
                if ((word & 1) != 0) found.push_back(rank);
        return found;
    }

  private:
    std::atomic<uint32_t> any_, words_[kRanks / 32];
};

// One rank of one communicator.
struct Entry {
    std::atomic<uint64_t> communicator;  // 0: a free place
    uint32_t rank, ranks;
    ShownRanks awaited;                  // none: it does not wait
    std::atomic<uint32_t> round, moved;
    std::atomic<uint32_t> messages;      // it waits for parts of messages, not for the others' round
    std::atomic<uint32_t> seen[kRanks];
    Member members[kRanks];
    char name[128], text[1024];
    std::atomic<uint64_t> finished;      // collectives
    Header last[2];                      // the last two of them, by number
};

// A thread that waits for ranks of a communicator that is being made (first_use.cpp).
struct First {
    std::atomic<uint32_t> used;
    ShownRanks awaited;      // those that have not come; none: nothing is known yet
    Member members[kRanks];  // process 0: unknown
    uint32_t others;             // if not 0, a rank of an unknown process is one of so many processes
    Member candidates[kRanks];
    char text[1024];
};

struct Board {
    std::atomic<uint64_t> number;   // counts what the process does
    std::atomic<uint32_t> blocked;
    std::atomic<uint32_t> still, outside, options, needs, wanted;  // standstill.cpp
    std::atomic<int32_t> device;    // 1 + the first one
    std::atomic<uint64_t> verdict;  // the number at which the text below was right
    char text[65536];
    std::atomic<uint32_t> asked, answered;  // questions whether what `firsts` show is still true
    First firsts[kMeetings];
    std::atomic<uint32_t> reached;  // entries that were ever in use
    Entry all_entries[kCommunicators];

    struct Entries {
        Entry *first, *last;
        Entry* begin() const { return first; }
        Entry* end() const { return last; }
    };
    Entries entries() { return {all_entries, all_entries + std::min(reached.load(), kCommunicators)}; }
};

struct Own {
    int32_t process = 0, file = -1;
    Board* board = nullptr;
};
Own own;  // guarded by the runtime's lock

void open_own() {
    if (own.process == getpid()) return;  // a forked process needs a board of its own
    own = {getpid(), memfd_create("npu_emulator", MFD_CLOEXEC), nullptr};
    if (own.file < 0 || ftruncate(own.file, sizeof(Board)) != 0) return;
    void* memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, own.file, 0);
    if (memory != MAP_FAILED) own.board = static_cast<Board*>(memory);
}

Entry* entry_of(Board* board, uint64_t communicator, uint32_t rank) {
    if (board == nullptr) return nullptr;
    for (Entry& entry : board->entries())
        if (entry.communicator.load() == communicator && entry.rank == rank) return &entry;
    return nullptr;
}

Entry* entry_of(const Communicator& c) { return own.process == getpid() ? entry_of(own.board, c.id, c.rank) : nullptr; }

std::map<const void*, std::string> told;  // this process's waits, an Entry or a First each, that a deadlock was found for

uint32_t unwatched = 0;  // waits to meet, and communicators, those that have ended included, without a place on the board

// The boards of the processes that are blocked and reached through what they wait for; or all processes that share
// communicators, directly or through others.
class Picture {
  public:
    explicit Picture(bool everyone = false) : everyone_(everyone) { visit({own.process, own.file}); }
    ~Picture() {
        for (auto& [process, board] : boards_)
            if (board != own.board && board != nullptr) munmap(board, sizeof(Board));
    }

    // The processes that wait for each other for ever, if this one is among them.
    std::set<int32_t> deadlocked() {
        std::set<int32_t> left;
        for (const auto& [process, number] : numbers_) left.insert(process);
        for (bool changed = true; changed;) {
            changed = false;
            for (auto item = left.begin(); item != left.end();)
                if (stays(*boards_[*item], left)) {
                    ++item;
                } else {
                    item = left.erase(item);
                    changed = true;
                }
        }
        if (left.count(own.process) == 0 || !still_blocked(left)) return {};
        return confirmed(left) ? circle_in(left) : std::set<int32_t>();
    }

    // Whether none of them has gone on since it was read.
    bool still_blocked(const std::set<int32_t>& processes) {
        return std::all_of(processes.begin(), processes.end(), [this](int32_t process) {
            const Board& board = *boards_[process];
            return board.blocked.load() != 0 && board.number.load() == numbers_[process];
        });
    }

    // Whether no process can go on by itself, some program waits for its device, and this process is the first one with work.
    // `seen` then identifies the state, or is 0 if every program waits for its device, so that nothing else can happen.
    bool elects_this(uint64_t& seen) {
        if (!all_still_) return false;
        std::pair<int32_t, int32_t> first{INT32_MAX, 0};
        bool needed = false, outside = false;
        uint64_t sum = 1;
        for (const auto& [process, number] : numbers_) {
            Board& board = *boards_[process];
            for (Entry& entry : board.entries())
                if (entry.communicator.load() != 0 && entry.awaited.any() && missing(entry).empty()) return false;
            needed = needed || board.needs.load() != 0;
            outside = outside || board.outside.load() != 0;
            sum += number;
            if (board.options.load() != 0) first = std::min(first, {board.device.load(), process});
        }
        for (const auto& [process, number] : numbers_)
            if (boards_[process]->still.load() == 0 || boards_[process]->number.load() != number) return false;
        seen = outside ? sum : 0;
        return needed && first.second == own.process;
    }

    void tell(const std::set<int32_t>& processes, const std::string& text) {
        for (const int32_t process : processes) {
            Board& board = *boards_[process];
            if (board.verdict.load() == numbers_[process]) continue;
            snprintf(board.text, sizeof board.text, "%s", text.c_str());
            board.verdict.store(numbers_[process]);
        }
    }

    std::vector<std::string> lines(const std::set<int32_t>& processes) {
        std::vector<std::string> found;
        for (const int32_t process : processes)
            for (Entry& entry : boards_[process]->entries())
                if (entry.communicator.load() != 0 && entry.awaited.any())
                    found.push_back(std::string(entry.text) + ", waits for " + names(missing(entry)));
        for (const int32_t process : processes)
            for (First& first : boards_[process]->firsts)
                if (first.used.load() != 0) found.push_back(std::string(first.text) + ", waits for " + names(first.awaited.all()));
        std::sort(found.begin(), found.end());
        return found;
    }

    // The last collective of each communicator that all of its ranks in these processes have finished: there they part.
    std::vector<std::string> last_in_common(const std::set<int32_t>& processes) {
        std::map<uint64_t, std::vector<const Entry*>> shared;
        for (const int32_t process : processes)
            for (const Entry& entry : boards_[process]->entries())
                if (entry.communicator.load() != 0) shared[entry.communicator.load()].push_back(&entry);
        std::vector<std::string> found;
        for (auto& [communicator, entries] : shared) {
            const auto least = std::min_element(entries.begin(), entries.end(), [](const Entry* one, const Entry* other) {
                return std::make_pair(one->finished.load(), one->rank) < std::make_pair(other->finished.load(), other->rank);
            });
            const uint64_t number = (*least)->finished.load();
            if (entries.size() < 2 || number == 0) continue;
            found.push_back("these ranks of " + std::string((*least)->name) + " have all finished " + describe((*least)->last[number & 1], nullptr, 0) + " of rank " +
                            std::to_string((*least)->rank) + ", and part behind it");
        }
        std::sort(found.begin(), found.end());
        return found;
    }

  private:
    const bool everyone_;
    bool all_still_ = true;
    std::set<int32_t> visited_;
    std::map<int32_t, Board*> boards_;
    std::map<int32_t, uint64_t> numbers_;  // of those that are blocked

    void visit(const Member& member) {
        Board* board = board_of(member);
        if (board == nullptr || !visited_.insert(member.process).second) return;
        const uint64_t number = board->number.load();
        if (everyone_ && board->still.load() == 0) {
            all_still_ = false;
            board->wanted.store(1);
        }
        if ((everyone_ ? board->still : board->blocked).load() == 0) return;
        numbers_[member.process] = number;
        for (First& first : board->firsts)
            if (first.used.load() != 0 && !everyone_) {
                for (const uint32_t rank : first.awaited.all()) visit(first.members[rank]);
                for (uint32_t other = 0; other < first.others; ++other) visit(first.candidates[other]);
            }
        for (Entry& entry : board->entries()) {
            if (entry.communicator.load() == 0 || (!entry.awaited.any() && !everyone_)) continue;
            for (uint32_t rank = 0; rank < entry.ranks; ++rank)
                if (!everyone_ || entry_of(board_of(entry.members[rank]), entry.communicator.load(), rank) != nullptr) visit(entry.members[rank]);
        }
    }

    Board* board_of(const Member& member) {
        const auto [item, fresh] = boards_.emplace(member.process, nullptr);
        if (fresh) item->second = member.process == own.process ? own.board : map(member);
        return item->second;
    }

    static Board* map(const Member& member) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/fd/%d", member.process, member.board);
        const int file = open(path, O_RDWR | O_CLOEXEC);
        if (file < 0) return nullptr;
        void* memory = lseek(file, 0, SEEK_END) == sizeof(Board) ? mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
        close(file);
        return memory == MAP_FAILED ? nullptr : static_cast<Board*>(memory);
    }

    // The awaited ranks that have not come.
    std::vector<uint32_t> missing(const Entry& entry) {
        std::vector<uint32_t> found;
        for (const uint32_t rank : entry.awaited.all()) {
            const Entry* theirs = entry_of(boards_[entry.members[rank].process], entry.communicator.load(), rank);
            if (theirs == nullptr) continue;  // it has left, which `await` notices
            const bool came = entry.messages.load() != 0 ? theirs->moved.load() != entry.seen[rank].load()
                                                         : static_cast<int32_t>(theirs->round.load() - entry.round.load()) >= 0;
            if (!came) found.push_back(rank);
        }
        return found;
    }

    // What a process shows of a communicator that is being made may be out of date: a rank may have come since. So each such process
    // is asked, once all are known to be blocked, and answers when it has found the same again. Nobody has left its wait
    // meanwhile, or its number would be another one.
    bool confirmed(const std::set<int32_t>& processes) {
        static std::map<int32_t, std::pair<uint64_t, uint32_t>> questions;  // process -> its number then, the question
        bool all = true;
        for (const int32_t process : processes) {
            Board& board = *boards_[process];
            if (std::none_of(std::begin(board.firsts), std::end(board.firsts), [](const First& first) { return first.used.load() != 0; })) continue;
            auto& [number, question] = questions[process];
            if (question == 0 || number != numbers_[process]) {
                number = numbers_[process];
                question = board.asked.fetch_add(1) + 1;
            }
            all = all && static_cast<int32_t>(board.answered.load() - question) >= 0 && board.number.load() == number;
        }
        return all;
    }

    // The processes for which a wait waits: for each of the known ones, and for one of those that a rank of an unknown process can be.
    struct Lack {
        std::set<int32_t> known, candidates;
    };

    // For each wait of a process, what it lacks.
    std::vector<Lack> lacking(Board& board) {
        std::vector<Lack> found;
        const auto add = [&](const std::vector<uint32_t>& ranks, const Member* members) {
            found.emplace_back();
            for (const uint32_t rank : ranks) found.back().known.insert(members[rank].process);
        };
        for (const First& first : board.firsts) {
            if (first.used.load() == 0) continue;
            add(first.awaited.all(), first.members);
            for (uint32_t other = 0; other < first.others; ++other) found.back().candidates.insert(first.candidates[other].process);
        }
        for (const Entry& entry : board.entries())
            if (entry.communicator.load() != 0 && entry.awaited.any()) add(missing(entry), entry.members);
        return found;
    }

    bool stays(Board& board, const std::set<int32_t>& left) {
        const auto is_left = [&](int32_t process) { return left.count(process) != 0; };
        const auto lacks_one = [&](const Lack& lack) {
            const auto& [known, candidates] = lack;
            return std::any_of(known.begin(), known.end(), is_left) || (!candidates.empty() && std::all_of(candidates.begin(), candidates.end(), is_left));
        };
        const std::vector<Lack> waits = lacking(board);
        return std::all_of(waits.begin(), waits.end(), lacks_one);
    }

    // Those of the processes that wait for this one, directly or through others; none if it does not itself wait for one of them.
    std::set<int32_t> circle_in(const std::set<int32_t>& left) {
        std::set<int32_t> circle;
        for (bool changed = true; changed;) {
            changed = false;
            for (const int32_t process : left)
                for (Lack& lack : lacking(*boards_[process])) {
                    lack.known.merge(lack.candidates);
                    for (const int32_t other : lack.known)
                        if (other == own.process || circle.count(other) != 0) changed = circle.insert(process).second || changed;
                }
        }
        return circle.count(own.process) != 0 ? circle : std::set<int32_t>();
    }

    static std::string names(const std::vector<uint32_t>& ranks) {
        std::string text = ranks.size() == 1 ? "rank " : "ranks ";
        for (const uint32_t rank : ranks) text += (rank == ranks.front() ? "" : ", ") + std::to_string(rank);
        return text;
    }
};

}  // namespace

int32_t board_file() {
    open_own();
    return own.file;
}

void show_on_board(const Communicator& c) {
    ++unwatched;
    if (own.board == nullptr) return;
    if (own.board->device.load() == 0) own.board->device.store(c.device + 1);
    for (Entry& entry : own.board->all_entries) {
        if (entry.communicator.load() != 0) continue;
        own.board->reached.store(std::max(own.board->reached.load(), static_cast<uint32_t>(&entry - own.board->all_entries) + 1));
        entry.rank = c.rank;
        entry.ranks = c.ranks;
        entry.awaited.store({});
        entry.round.store(0);
        entry.moved.store(0);
        entry.finished.store(0);
        snprintf(entry.name, sizeof entry.name, "%s", c.name.c_str());
        for (uint32_t rank = 0; rank < c.ranks; ++rank) entry.members[rank] = {c.seat(rank).process.load(), c.seat(rank).board};
        entry.communicator.store(c.id);
        --unwatched;
        return;
    }
}

void hide_from_board(const Communicator& c) {
    if (Entry* entry = entry_of(c)) entry->communicator.store(0);
    goes_on();
}

void show_waiting(const Communicator& c, const Awaited& awaited) {
    Entry* entry = entry_of(c);
    if (entry == nullptr) return;
    entry->round.store(c.round);
    entry->messages.store(awaited.seen != nullptr);
    for (uint32_t rank = 0; awaited.seen != nullptr && rank < c.ranks; ++rank) entry->seen[rank].store((*awaited.seen)[rank]);
    if (c.running != nullptr) snprintf(entry->text, sizeof entry->text, "%s", describe(c, *c.running).c_str());
    entry->awaited.store(awaited.ranks);
}

// Others that see the wait gone see the new number, too.
void show_working(const Communicator& c) {
    goes_on();
    if (Entry* entry = entry_of(c)) {
        told.erase(entry);
        entry->awaited.store({});
        entry->round.store(c.round);
    }
}

// Before the other rank is woken, so that nobody takes it for blocked.
void note_moved(const Communicator& c) {
    c.seat(c.rank).moved.fetch_add(1);
    if (Entry* entry = entry_of(c)) entry->moved.fetch_add(1);
}

void note_finished(const Communicator& c, const Exchange& e) {
    Entry* entry = e.kind == Collective::SendReceive ? nullptr : entry_of(c);
    if (entry == nullptr) return;
    entry->last[c.number & 1] = header_of(e, c.number);
    entry->finished.store(c.number);
}

void goes_on() {
    if (own.board == nullptr || own.process != getpid()) return;
    own.board->blocked.store(0);
    own.board->still.store(0);
    own.board->number.fetch_add(1);
}

bool is_watched() { return own.board != nullptr && own.process == getpid() && unwatched == 0; }

namespace {

// Of what every wait of this process is a part.
std::string find_deadlock(Lock& lock) {
    if (!is_watched() || !is_blocked(lock)) return "";
    if (own.board->blocked.exchange(1) != 0 && own.board->verdict.load() == own.board->number.load()) return own.board->text;
    Picture picture;
    const std::set<int32_t> processes = picture.deadlocked();
    if (processes.empty()) return "";
    std::string text = "the ranks wait for each other:";
    for (const std::string& line : picture.lines(processes)) text += "\n  " + line;
    for (const std::string& line : picture.last_in_common(processes)) text += "\n  " + line;
    // One that found the deadlock as well may have gone on while its lines were read. It told this process first.
    if (!picture.still_blocked(processes)) return own.board->verdict.load() == own.board->number.load() ? own.board->text : "";
    picture.tell(processes, text);
    return text;
}

// The ranks of one process are told the same, although the first one that is told goes on.
std::string find_deadlock(const void* wait, Lock& lock) {
    if (const auto known = told.find(wait); known != told.end()) return known->second;
    const std::string found = find_deadlock(lock);
    if (found.empty()) return "";
    for (const Entry& entry : own.board->entries())
        if (entry.communicator.load() != 0 && entry.awaited.any()) told[&entry] = found;
    for (const First& first : own.board->firsts)
        if (first.used.load() != 0) told[&first] = found;
    return found;
}

}  // namespace

std::string find_deadlock(const Communicator& c, Lock& lock) { return find_deadlock(entry_of(c), lock); }

}  // namespace emu
