#include <flashattn.h>
#include <stdio.h>

int main(void) {
  printf("%s\n", flashattn_build_info());
  return flashattn_version() < 200;
}
