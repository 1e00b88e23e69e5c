/* The libstdc++.a of a newer machine reads this variable of glibc 2.32. 0 says that other threads may
   run: reference counts then stay atomic, which is right on every glibc. */
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
