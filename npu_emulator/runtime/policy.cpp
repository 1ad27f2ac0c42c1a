// Chooses the next of the ready tasks, and how much runs at a launch. Every choice is a function of the schedule alone (no
// clock, no addresses), so the same program under the same schedule runs in the same order.
//
// fifo     all work at its launch, in launch order
// lazy     nothing until something waits for it, and then the work that the waiter needs; else the stream of the highest
// priority, and among equal ones the first launch random   a seeded coin at every step
// pct      probabilistic concurrency testing (Burckhardt et al., ASPLOS 2010): streams have random priorities, the highest
//          ready one runs, and at DEPTH - 1 random steps the running one falls to the bottom. Finds a bug that needs DEPTH
//          ordering constraints with probability at least 1 / (streams * steps^(DEPTH - 1)).
// choices  a list of numbers: the n-th decision between several tasks takes number n, then always the first; the choices and
// the numbers of candidates are stored, so that a search can visit all of them
#include "emulator.h"

namespace emu {
namespace {

constexpr uint64_t kPctSteps = 256;  // change points are among the first so many steps

struct Pct {
    std::map<std::pair<int32_t, uint32_t>, uint64_t> priority;  // (stream, lane) -> larger runs first
    std::set<uint64_t> change_points;
    uint64_t step = 0;
    uint64_t floor = uint64_t{1} << 32;  // each demotion is below all earlier ones
};

Pct pct;

std::pair<int32_t, uint32_t> place(const Choice& choice) {
    return {choice.stream->id, choice.run == nullptr ? UINT32_MAX : choice.lane};
}

const Choice& pick_by_priority(const std::vector<Choice>& found) {
    State& s = state();
    const Choice* best = nullptr;
    uint64_t highest = 0;
    for (const Choice& choice : found) {
        auto [known, inserted] = pct.priority.emplace(place(choice), 0);
        if (inserted) known->second = (uint64_t{1} << 33) + s.random() % (uint64_t{1} << 40);
        if (best == nullptr || known->second > highest) {
            best = &choice;
            highest = known->second;
        }
    }
    if (pct.change_points.count(pct.step++) != 0) pct.priority[place(*best)] = --pct.floor;
    return *best;
}

const Choice& pick_by_list(const std::vector<Choice>& found) {
    State& s = state();
    if (found.size() == 1) return found[0];
    const size_t turn = s.decisions.size();
    const uint32_t wanted = turn < s.choices.size() ? s.choices[turn] : 0;
    const auto index = std::min<uint32_t>(wanted, static_cast<uint32_t>(found.size()) - 1);
    s.decisions.emplace_back(index, static_cast<uint32_t>(found.size()));
    return found[index];
}

const Choice& pick_in_order(const std::vector<Choice>& found) {
    return *std::min_element(found.begin(), found.end(), [](const Choice& a, const Choice& b) { return a.order < b.order; });
}

// Only this policy uses priorities: launch order leaves no choice, and the searching policies must try every order.
const Choice& pick_by_need(const std::vector<Choice>& found, const Stream* wanted) {
    const auto key = [&](const Choice& choice) {
        return std::make_tuple(choice.stream != wanted, choice.stream->priority, choice.order);
    };
    return *std::min_element(found.begin(), found.end(), [&](const Choice& a, const Choice& b) { return key(a) < key(b); });
}

}  // namespace

const Choice& pick(const std::vector<Choice>& found, const Stream* wanted) {
    State& s = state();
    switch (s.policy) {
        case Policy::Random: return found[s.random() % found.size()];
        case Policy::Pct: return pick_by_priority(found);
        case Policy::Choices: return pick_by_list(found);
        case Policy::Lazy: return pick_by_need(found, wanted);
        default: return pick_in_order(found);
    }
}

uint64_t steps_at_launch() {
    State& s = state();
    return s.policy == Policy::Random || s.policy == Policy::Pct ? s.random() % 3 : 0;
}

void choose_policy(Policy policy, uint64_t seed, uint32_t depth) {
    State& s = state();
    s.policy = policy;
    s.random.seed(seed);
    s.choices.clear();
    s.decisions.clear();
    if (policy == Policy::Fifo) let_go(s);
    pct = Pct();
    if (policy == Policy::Pct)
        for (uint32_t point = 1; point < depth; ++point) pct.change_points.insert(s.random() % kPctSteps);
}

}  // namespace emu
