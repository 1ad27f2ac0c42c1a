// Ctrl-C while the runtime calls Python: it waits until the call has ended, and nothing that its handler raises is lost.
//
// A call from C++ is where an exception ends, and Python runs a signal's handler at any of its instructions, the first of a
// function included. So Python sees no SIGINT during a call. What came before is handled before the call. What that raises,
// and the signal that came during the call, go to npu_emulator/interrupts.py where the runtime returns to the program.
#include <vector>

#include <sys/syscall.h>
#include <unistd.h>

#include "emulator.h"

struct _object;

// Weak, as in scheduler.cpp.
extern "C" {
__attribute__((weak)) int Py_IsInitialized(void);
__attribute__((weak)) int PyGILState_Ensure(void);
__attribute__((weak)) void PyGILState_Release(int);
__attribute__((weak)) int Py_MakePendingCalls(void);
__attribute__((weak)) int Py_AddPendingCall(int (*)(void*), void*);
__attribute__((weak)) void PyErr_Fetch(_object**, _object**, _object**);
__attribute__((weak)) void PyErr_Restore(_object*, _object*, _object*);
__attribute__((weak)) void PyErr_NormalizeException(_object**, _object**, _object**);
__attribute__((weak)) int PyException_SetTraceback(_object*, _object*);
__attribute__((weak)) _object* PyObject_CallFunctionObjArgs(_object*, ...);
__attribute__((weak)) void Py_DecRef(_object*);
__attribute__((weak)) void Py_IncRef(_object*);
}

namespace emu {

namespace {

// What waits, of this thread; signals that come before the first is delivered are one, as in Python.
struct Late {
    bool in_a_call = false, interrupt = false;
    std::vector<_object*> exceptions;
};
thread_local Late late;
_object* python_raise = nullptr;  // set below
std::atomic<bool> noted{false};

void note_interrupt(int) { noted = true; }

_object* take_exception() {
    _object *type = nullptr, *exception = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &exception, &traceback);
    PyErr_NormalizeException(&type, &exception, &traceback);
    if (traceback != nullptr) PyException_SetTraceback(exception, traceback);
    Py_DecRef(type);
    Py_DecRef(traceback);
    return exception;
}

int raise_now(void* exception) {
    _object* answer = PyObject_CallFunctionObjArgs(python_raise, exception, nullptr);
    Py_DecRef(static_cast<_object*>(exception));
    Py_DecRef(answer);
    return answer == nullptr ? -1 : 0;
}

}  // namespace

Uninterrupted::Uninterrupted(bool delivers) : delivers_(delivers) {
    // Only the main thread runs handlers. Elsewhere a call that waits for ever would keep Ctrl-C from it.
    if (late.in_a_call || python_raise == nullptr || !Py_IsInitialized() || syscall(SYS_gettid) != getpid()) return;
    outermost_ = late.in_a_call = true;
    sigaction(SIGINT, nullptr, &before_);
    noting_ = before_.sa_handler != SIG_DFL && before_.sa_handler != SIG_IGN;
    if (noting_) {
        struct sigaction noting = before_;
        noting.sa_flags &= ~SA_SIGINFO;
        noting.sa_handler = note_interrupt;
        sigaction(SIGINT, &noting, nullptr);
    }
    const int gil = PyGILState_Ensure();
    _object *type, *value, *traceback;  // perhaps of an exception on its way out of a frame that drops a tensor
    PyErr_Fetch(&type, &value, &traceback);
    while (Py_MakePendingCalls() != 0) late.exceptions.push_back(take_exception());
    PyErr_Restore(type, value, traceback);
    PyGILState_Release(gil);
}

Uninterrupted::~Uninterrupted() {
    if (!outermost_) return;
    late.in_a_call = false;
    if (noting_) {
        struct sigaction now;
        sigaction(SIGINT, &before_, &now);
        if (now.sa_handler != note_interrupt) sigaction(SIGINT, &now, nullptr);  // the call has set a handler
        late.interrupt |= noted.exchange(false);
    }
    if (delivers_) deliver_interrupts();
}

bool was_interrupted() { return noted || late.interrupt || !late.exceptions.empty(); }

void deliver_interrupts() {
    if (late.in_a_call) return;
    if (late.interrupt && Py_AddPendingCall(raise_now, nullptr) == 0) late.interrupt = false;
    auto& exceptions = late.exceptions;
    while (!exceptions.empty() && Py_AddPendingCall(raise_now, exceptions.front()) == 0) exceptions.erase(exceptions.begin());
}

}  // namespace emu

// The function of npu_emulator/interrupts.py, for good.
EMU_API void emu_set_raise(_object* raise) {
    Py_IncRef(raise);
    emu::python_raise = raise;
}

// From inside a call of Python.
EMU_API void emu_raise_later(_object* exception) {
    Py_IncRef(exception);
    emu::late.exceptions.push_back(exception);
}
