// Keeps threads that Python ends during exit from aborting the process.
//
// Before 3.14, once the interpreter is finalizing, Python ends a thread that asks for the GIL by unwinding the thread's
// stack. A C++ destructor does not allow this: the whole process dies of SIGABRT ("terminate called without an active
// exception") instead of returning its exit code. Torch's gloo workers are such threads: after a collective, they free
// its tensors, which takes the GIL.
#pragma once

namespace elixir {

// From now on, such a thread sleeps until the process has exited, as in Python 3.14. Must be called by the thread that
// finalizes the interpreter, which is never put to sleep.
void park_ended_threads();

}  // namespace elixir
