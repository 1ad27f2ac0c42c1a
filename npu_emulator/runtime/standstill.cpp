// The order of a rank's tasks, whatever the time at which other ranks come.
//
// Under every schedule but fifo, a collective that the schedule chooses is held: the device starts it, waits for its end, and runs
// nothing else. So the time at which it ends decides nothing, and the order is a function of the schedule and the program. Two
// kinds of programs need more than that: ranks that chose collectives in crossing order, and a rank whose program waits outside
// the device (for a store, for another process) while another rank needs the work that it has queued.
//
// So each process shows on its board whether it stands still: its program waits for the device, which holds a collective, or
// sleeps outside. When all do, and none can go on, that state is a function of the programs and the schedule, too. Then one
// process goes on, that of the smallest device which has other work: it does not wait for the held collective at present, and the
// collective's engine touches no memory before it does again.
#include <dirent.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "communicator.h"

namespace emu {
namespace {

constexpr uint32_t kLooks = 25;       // a program sleeps if so many looks, kPause apart, find all its threads asleep
constexpr uint32_t kLooksAgain = 5;   // how many of them see the present state of all processes
constexpr int kPause = 20;            // milliseconds
constexpr double kPatience = 5000;    // of processor time, for a program that computes outside the device while others wait
constexpr uint64_t kQueries = 2000;   // a program waits, too, if it asks so often for events or streams, and does nothing else
constexpr uint64_t kQueriesAgain = 20;

std::string contents(const char* path) {
    char text[512];
    FILE* file = fopen(path, "r");
    if (file == nullptr) return "";
    const size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    return {text, length};
}

// It wakes up again and again, but only to look.
bool is_meeting(int32_t thread) {
    const auto& meeting = state().meeting;
    return std::any_of(meeting.begin(), meeting.end(), [&](const auto& item) { return item.second == thread; });
}

// Whether the main thread sleeps, and no other thread but engines has been running, or waiting for a processor, for half of the time
// since the last call. Threads of libraries wake up for moments.
bool threads_sleep(double now) {
    static std::map<int, uint64_t> times;
    static double last = 0;
    const double passed = now - std::exchange(last, now);
    DIR* folder = opendir("/proc/self/task");
    if (folder == nullptr) return true;
    bool asleep = true;
    std::map<int, uint64_t> present;
    while (const dirent* item = readdir(folder)) {
        const int thread = atoi(item->d_name);
        if (thread == 0 || is_engine(thread) || is_meeting(thread)) continue;
        const std::string place = std::string("/proc/self/task/") + item->d_name;
        uint64_t ran = 0, waited = 0;
        sscanf(contents((place + "/schedstat").c_str()).c_str(), "%lu %lu", &ran, &waited);
        present[thread] = ran + waited;
        const auto before = times.find(thread);
        if (before == times.end() || static_cast<double>(ran + waited - before->second) / 1e6 >= passed / 2) asleep = false;
        if (thread != getpid()) continue;
        const std::string line = contents((place + "/stat").c_str());
        const size_t name = line.rfind(')');
        if (name != std::string::npos && line.size() > name + 2 && (line[name + 2] == 'R' || line[name + 2] == 'D')) asleep = false;
    }
    closedir(folder);
    times = std::move(present);
    return asleep;
}

// What is known of the program since it last used the device; guarded by the runtime's lock.
struct Program {
    uint64_t calls = 0, queries = 0;
    uint32_t looks = 0;
    double looked = 0, used = 0;
    uint64_t number = 0, queries_then = 0;  // when the device last went on
};
Program program;

// A state of all processes in which programs wait outside the device, and how often it was found.
struct Finding {
    uint64_t seen = 0;
    uint32_t times = 0;
    double last = 0;
};
Finding finding;

double processor_time() {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
}

// Whether the program waits outside the device, or does as good as that.
bool is_outside(const State& s) {
    const double now = now_milliseconds();
    if (program.calls != s.calls) program = {s.calls, s.queries, 0, now, processor_time(), 0, 0};
    if (const uint64_t number = own.board->number.load(); program.number != number) {
        program.number = number;
        program.queries_then = s.queries;
    }
    if (s.queries - program.queries >= kQueries && s.queries - program.queries_then >= kQueriesAgain) return true;
    if (now - program.looked >= kPause) {
        program.looks = threads_sleep(now) ? std::min(kLooks, program.looks + 1) : program.looks - std::min(program.looks, 2U);
        program.looked = now;
    }
    return program.looks >= kLooks || processor_time() - program.used >= kPatience;
}

bool stands_still(State& s, bool& outside) {
    if (s.busy || s.draining || !engines_wait()) return false;
    if (!s.waiting.empty()) {
        if (s.held ? can_end(s.held) : !choices(s).empty() || !s.deferred.empty()) return false;
        if (some_wait_is_over()) return false;
        if (everybody_waits()) return true;
    }
    outside = true;
    return is_outside(s);
}

// Whether the device could go on if it did not wait for the collective that it holds.
bool has_other_work(State& s) {
    if (s.policy == Policy::Fifo) return false;  // there work runs as soon as it can
    if (s.held && can_end(s.held)) return s.waiting.empty();
    return !choices(s).empty() || std::any_of(s.deferred.begin(), s.deferred.end(), can_end);
}

// A message may be under way to a program that waits outside the device, so the state must last.
bool lasts(uint64_t seen) {
    if (seen == 0) return true;
    const double now = now_milliseconds();
    if (finding.seen != seen) finding = {seen, 0, now};
    if (now - finding.last < kPause) return false;
    finding.last = now;
    return ++finding.times >= kLooksAgain;
}

// The program or, where it waits outside the device, this engine runs other work, up to the next collective.
void go_on(State& s, Lock& lock) {
    goes_on();
    if (s.held && !can_end(s.held)) {
        s.held->released = true;
        s.deferred.push_back(std::exchange(s.held, nullptr));
    }
    for (const AwayRef& away : s.deferred)
        if (can_end(away)) away->released = false;
    s.changed.notify_all();
    if (!s.waiting.empty()) return;
    s.draining = true;
    resume_held(s);
    while (!s.held && step(lock, nullptr)) {
    }
    s.draining = false;
    goes_on();
    s.changed.notify_all();
}

}  // namespace

bool can_end(const AwayRef& away) { return away->ended || away->suspended; }

// An engine reads and writes memory only while the device waits for its collective: what it moves is what the schedule says.
void wait_until_held(Communicator& c) {
    State& s = state();
    Lock lock(s.mutex);
    const auto goes = [&] { return !c.away || !c.away->held || s.held == c.away || c.stop.load(); };
    if (goes()) return;
    c.away->suspended = true;
    c.working = false;
    show_working(c);
    s.changed.notify_all();
    while (!goes()) {
        s.changed.wait_for(lock, std::chrono::milliseconds(kPause), goes);
        if (!goes()) look_for_standstill(lock);
    }
    c.away->suspended = false;
    c.working = true;
    goes_on();
}

bool holds_collectives() { return state().policy != Policy::Fifo && is_watched(); }

// Ends the held collective if the ranks have ended it.
bool resume_held(State& s) {
    if (!s.held || !s.held->ended) return false;
    goes_on();
    const AwayRef away = std::exchange(s.held, nullptr);
    for (const AwayRef& other : s.deferred) other->released = false;
    away->finish();
    away->place.away.reset();
    return true;
}

// A collective that has failed decides no order.
void forget_held(State& s, const AwayRef& away) {
    if (s.held == away) s.held.reset();
    s.deferred.erase(std::remove(s.deferred.begin(), s.deferred.end(), away), s.deferred.end());
}

// For fifo, where streams go on as soon as they can.
void let_go(State& s) {
    std::vector<AwayRef> all = std::exchange(s.deferred, {});
    if (s.held) all.push_back(std::exchange(s.held, nullptr));
    for (const AwayRef& away : all) {
        away->held = false;
        if (!away->ended) continue;
        away->finish();
        away->place.away.reset();
    }
}

// Called again and again by engines that have nothing to do, or wait for other ranks. Whether it is of use to look again soon.
bool look_for_standstill(Lock& lock) {
    State& s = state();
    if (!is_watched()) return false;
    const bool options = has_other_work(s);
    if (!options && own.board->wanted.load() == 0 && own.board->still.load() == 0) return false;
    bool outside = false;
    if (!stands_still(s, outside)) {
        if (own.board->still.load() != 0) goes_on();
        return true;
    }
    own.board->options.store(options);
    own.board->needs.store(!s.waiting.empty() || s.queries - program.queries >= kQueriesAgain);
    own.board->outside.store(outside);
    own.board->wanted.store(0);
    own.board->still.store(1);
    uint64_t seen = 0;
    if (options && Picture(true).elects_this(seen) && lasts(seen)) go_on(s, lock);
    return true;
}

}  // namespace emu
