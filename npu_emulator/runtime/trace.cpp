// A log of everything that orders work, for checkers in Python: launches, records, waits, captured tasks, replays, and the
// moments at which the host learns that work has finished. Launches decide the order, so one log covers all schedules. Only a
// checker switches it on.
#include "communicator.h"
#include "emulator.h"

namespace emu {

enum class NoteKind : uint64_t { Kernel, Copy, Fill, Record, Wait, Replay, SyncStream, SyncDevice, SyncTicket, CollectiveRead, CollectiveWrite, Reset, TicketFree, Allocated };

// In 40 bits, the same on every rank.
static uint64_t number_of(const Communicator& c) { return (c.id >> 32 << 18 | (c.id & 0x3FFFF)) & 0xFFFFFFFFFF; }

// Which collective: its kind in 8 bits, the ranks in 16, and the communicator's number in 40.
static uint64_t kind_of(const Exchange& exchange) {
    const Communicator& c = *exchange.communicator;
    return static_cast<uint64_t>(exchange.kind) | uint64_t{c.ranks & 0xFFFF} << 8 | number_of(c) << 24;
}

// By a communicator's number, also after its end: the device of each rank. With the lock held.
static std::map<uint64_t, std::vector<int32_t>> devices_of_ranks;

void note_devices(const Communicator& c) {
    auto& devices = devices_of_ranks[number_of(c)];
    devices.clear();
    for (uint32_t rank = 0; rank < c.ranks; ++rank) devices.push_back(c.seat(rank).device);
}

// The memory of a collective as notes: those that it reads, then those that it writes, one at least, which may be empty.
// first: address; second: which collective; third: bytes.
std::vector<Note> ranges_of(const Exchange& exchange) {
    std::vector<Note> reads, writes;
    const auto add = [&](std::vector<Note>& to, NoteKind kind, const void* address, uint64_t bytes) {
        Note note;
        note.kind = static_cast<uint64_t>(kind);
        note.first = reinterpret_cast<uint64_t>(address);
        note.second = kind_of(exchange);
        note.third = bytes;
        to.push_back(note);
    };
    if (exchange.send_bytes != 0) add(reads, NoteKind::CollectiveRead, exchange.send, exchange.send_bytes);
    if (exchange.receive_bytes != 0) add(writes, NoteKind::CollectiveWrite, exchange.receive, exchange.receive_bytes);
    for (const HcclSendRecvItem& item : exchange.messages) {
        const bool sends = item.sendRecvType == HCCL_SEND;
        add(sends ? reads : writes, sends ? NoteKind::CollectiveRead : NoteKind::CollectiveWrite, item.buf, item.count * size_of(item.dataType));
    }
    if (writes.empty()) add(writes, NoteKind::CollectiveWrite, nullptr, 0);
    reads.insert(reads.end(), writes.begin(), writes.end());
    return reads;
}

namespace {

uint64_t id_of(const TicketRef& ticket) { return ticket ? ticket->id : 0; }

bool noteworthy(const Task& task) {
    return (task.kind <= Kind::ValueWait && task.kind != Kind::HostCall) || task.kind == Kind::Reset || task.kind == Kind::Collective;
}

// A task in three numbers: a kernel's key and its stream's cores, or a copy's two addresses and length, or a ticket and whether it is an external
// event's, or a graph.
void describe(Note& note, const Task& task) {
    switch (task.kind) {
        case Kind::Kernel: note.kind = static_cast<uint64_t>(NoteKind::Kernel); note.first = task.kernel; note.second = task.value; break;
        case Kind::Copy: note.kind = static_cast<uint64_t>(NoteKind::Copy); break;
        case Kind::Fill: note.kind = static_cast<uint64_t>(NoteKind::Fill); break;
        case Kind::Record:
        case Kind::Reset:
        case Kind::Wait:
            note.kind = static_cast<uint64_t>(task.kind == Kind::Record ? NoteKind::Record : task.kind == Kind::Reset ? NoteKind::Reset : NoteKind::Wait);
            note.first = id_of(task.ticket);
            note.second = task.ticket && task.ticket->external;
            break;
        // torch_npu's external events are words in memory, set by any number but 0; the word's address identifies the event.
        case Kind::ValueWrite:
            note.kind = static_cast<uint64_t>(task.value != 0 ? NoteKind::Record : NoteKind::Reset);
            note.first = reinterpret_cast<uint64_t>(task.destination);
            note.second = 1;
            break;
        case Kind::ValueWait:
            note.kind = static_cast<uint64_t>(NoteKind::Wait);
            note.first = reinterpret_cast<uint64_t>(task.source);
            note.second = 1;
            break;
        default: note.kind = static_cast<uint64_t>(NoteKind::Replay); note.first = task.graph ? task.graph->id : 0; break;
    }
    if (task.kind == Kind::Copy || task.kind == Kind::Fill) {
        note.first = reinterpret_cast<uint64_t>(task.destination);
        note.second = reinterpret_cast<uint64_t>(task.source);
        note.third = task.bytes;
        note.place = task.place;
    }
}

// One note, or several for a collective.
std::vector<Note> notes_of(const Task& task) {
    if (task.kind == Kind::Collective) return ranges_of(*task.exchange);
    Note note;
    describe(note, task);
    return {note};
}

}  // namespace

// Whether all external events that a task waits for are set now.
static bool is_open(const Task& task) {
    if (task.kind == Kind::Replay) return std::all_of(task.graph->tasks.begin(), task.graph->tasks.end(), is_open);
    if (task.kind == Kind::ValueWait) return *static_cast<const volatile uint64_t*>(task.source) != 0;
    return task.kind != Kind::Wait || !task.ticket || !task.ticket->external || task.ticket->done;
}

// The log is read later, and elsewhere, than the call that launches a copy. So the lines are looked up in the call.
uint64_t place_of_caller() {
    const auto find_place = python_place.load();
    if (!state().tracing || find_place == nullptr) return 0;
    const Uninterrupted guard;
    return find_place();
}

void note_launch(const Stream* stream, const Task& task) {
    State& s = state();
    if (!s.tracing || !noteworthy(task)) return;
    for (Note note : notes_of(task)) {
        note.stream = static_cast<uint64_t>(stream->id);
        if (task.kind == Kind::Replay || task.kind == Kind::Wait || task.kind == Kind::ValueWait) note.third = is_open(task);
        s.notes.push_back(note);
    }
}

// Messages that join a batch on its stream.
void note_messages(const Stream* stream, const Exchange& exchange) {
    State& s = state();
    if (!s.tracing) return;
    for (Note note : ranges_of(exchange)) {
        note.stream = static_cast<uint64_t>(stream->id);
        s.notes.push_back(note);
    }
}

static void add_captured(std::deque<Note>& to, const Graph& graph, uint32_t lane, uint32_t index, const Task& task) {
    if (!noteworthy(task)) return;
    for (Note note : notes_of(task)) {
        note.stream = lane;
        note.graph = graph.id;
        note.index = index;
        note.edge = static_cast<uint64_t>(task.edge + 1);
        to.push_back(note);
    }
}

void note_captured(const Graph& graph, uint32_t lane, uint32_t index, const Task& task) {
    if (state().tracing) add_captured(state().notes, graph, lane, index, task);
}

// The work that ran has a separate log: launches decide the order, but the schedule decides the time of execution.
void note_ran(const Stream* stream, const Task& task, const Graph* graph, uint64_t replay, uint32_t lane) {
    State& s = state();
    if (!s.logging || (task.kind > Kind::Fill && task.kind != Kind::Collective)) return;
    Note note;
    describe(note, task);
    if (task.kind == Kind::Collective) {  // first: which collective; second and third: bytes read and written
        note = {static_cast<uint64_t>(NoteKind::CollectiveWrite)};
        for (const Note& range : ranges_of(*task.exchange))
            (range.kind == static_cast<uint64_t>(NoteKind::CollectiveRead) ? note.second : note.third) += range.third;
        note.first = static_cast<uint64_t>(task.exchange->kind);
    }
    note.stream = static_cast<uint64_t>(stream->id);
    if (graph != nullptr) {
        note.graph = graph->id;
        note.index = replay;
        note.edge = lane;
    }
    s.ran.push_back(note);
}

namespace {

void note_sync(NoteKind kind, uint64_t what, uint64_t bytes = 0) {
    State& s = state();
    if (!s.tracing) return;
    Note note;
    note.kind = static_cast<uint64_t>(kind);
    note.first = what;
    note.third = bytes;
    s.notes.push_back(note);
}

}  // namespace

void note_stream_finished(const Stream* stream) { note_sync(NoteKind::SyncStream, static_cast<uint64_t>(stream->id)); }
void note_device_finished() { note_sync(NoteKind::SyncDevice, 0); }
void note_ticket_finished(const TicketRef& ticket) { note_sync(NoteKind::SyncTicket, id_of(ticket)); }
void note_ticket_free(const TicketRef& ticket) { note_sync(NoteKind::TicketFree, id_of(ticket)); }

}  // namespace emu

using namespace emu;

EMU_API void emu_set_tracing(int on) {
    State& s = state();
    Lock lock(s.mutex);
    s.tracing = on != 0;
    s.notes.clear();
}

// The allocator hands out a block.
EMU_API void emu_note_allocated(uint64_t address, uint64_t bytes) {
    Lock lock(state().mutex);
    note_sync(NoteKind::Allocated, address, bytes);
}

// Writes the devices of a communicator's ranks, by its number in notes, and returns their number.
EMU_API uint64_t emu_devices_of(uint64_t communicator, int32_t* devices, uint64_t capacity) {
    Lock lock(state().mutex);
    const auto& found = devices_of_ranks[communicator];
    std::copy_n(found.begin(), std::min<uint64_t>(capacity, found.size()), devices);
    return found.size();
}

// The name of a collective by its number in notes.
EMU_API const char* emu_collective_name(uint64_t number) { return name_of(static_cast<Collective>(number & 0xFF)); }

EMU_API void emu_set_logging(int on) {
    State& s = state();
    Lock lock(s.mutex);
    s.logging = on != 0;
    s.ran.clear();
}

namespace {

uint64_t take(std::deque<Note>& notes, uint64_t* out, uint64_t capacity) {
    static_assert(sizeof(Note) == 9 * sizeof(uint64_t), "Python reads notes as nine numbers");
    const uint64_t count = std::min<uint64_t>(capacity, notes.size());
    std::copy_n(notes.begin(), count, reinterpret_cast<Note*>(out));
    notes.erase(notes.begin(), notes.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
}

}  // namespace

// Each moves up to `capacity` notes, nine numbers each, into `out`, and returns their number.
EMU_API uint64_t emu_take_notes(uint64_t* out, uint64_t capacity) {
    State& s = state();
    Lock lock(s.mutex);
    return take(s.notes, out, capacity);
}
// The captured tasks of all graphs, those under capture included, as notes that are not in the log.
EMU_API uint64_t emu_captured(uint64_t* out, uint64_t capacity) {
    State& s = state();
    Lock lock(s.mutex);
    std::set<const Graph*> graphs(s.capturing.begin(), s.capturing.end());
    for (const auto& [handle, graph] : s.graphs) graphs.insert(graph.get());
    std::deque<Note> notes;
    for (const Graph* graph : graphs)
        for (uint32_t index = 0; index < graph->tasks.size(); ++index)
            add_captured(notes, *graph, graph->lane_of[index], index, graph->tasks[index]);
    const uint64_t count = notes.size();
    take(notes, out, capacity);
    return count;
}
EMU_API uint64_t emu_take_ran(uint64_t* out, uint64_t capacity) {
    State& s = state();
    Lock lock(s.mutex);
    return take(s.ran, out, capacity);
}
