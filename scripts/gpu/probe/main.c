/* Measures what the validation needs to know of a GPU and its driver. Prints one JSON object; on failure one line on stderr
 * and exit code 1.
 *
 *   probe device                                   driver, devices, NVML, MPS
 *   probe context                                  device memory from nothing to a first launch
 *   probe launch|alloc|info|first ...              what calls cost (calls.c)
 *   probe marks                                    completion marks (marks.c)
 *   probe vmm [MOST_BYTES]                         cost of physical handles (memory.c)
 *   probe pcie [BYTES]                             what the link carries (memory.c)
 *   probe turns SECONDS KERNEL_US GAP_US [host]    an always busy tenant and its gaps (turns.c)
 */
#include "driver.h"

#include <stdio.h>
#include <string.h>

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    int (*run)(int, char **);
  } modes[] = {{"device", mode_device}, {"context", mode_context}, {"launch", mode_launch}, {"alloc", mode_alloc},
               {"info", mode_info},     {"first", mode_first},     {"marks", mode_marks},   {"vmm", mode_vmm},
               {"pcie", mode_pcie},     {"turns", mode_turns}};
  for (size_t i = 0; argc > 1 && i < sizeof modes / sizeof *modes; i++)
    if (!strcmp(argv[1], modes[i].name)) return modes[i].run(argc - 2, argv + 2);
  fprintf(stderr, "probe: unknown mode '%s': device, context, launch, alloc, info, first, marks, vmm, pcie or turns\n", argc > 1 ? argv[1] : "");
  return 2;
}
