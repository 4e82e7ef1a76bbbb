// What becomes of a thread that Python ends while the process exits.
//
// Before 3.14, once the interpreter is finalizing, Python ends a thread that asks for its lock (the GIL) by unwinding
// the thread's stack. A C++ destructor lets nothing unwind through it: the whole process dies of SIGABRT ("terminate
// called without an active exception") and not with its exit code. Torch's gloo workers are such threads: when a
// collective is done, they free its tensors, which takes the lock.
#pragma once

namespace elixir {

// From now on such a thread stands still until the process has exited, as it does in Python 3.14. To be called by the
// thread that finalizes the interpreter, which is never held up.
void park_ended_threads();

}  // namespace elixir
