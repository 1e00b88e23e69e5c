/* What libstdc++.a of a newer machine wants of glibc 2.32. 0: other threads may run, so that reference
   counts stay atomic, which is right on every glibc. */
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
