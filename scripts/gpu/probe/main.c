/* Measures what the validation needs to know of a GPU and its driver. Prints one JSON object; on failure one line on stderr
 * and exit code 1.
 *
 *   probe device                                   driver, devices, NVML, MPS
 *   probe context                                  device memory from nothing to a first launch
 *   probe launch|alloc|info|first ...              what calls cost (calls.c)
 *   probe marks                                    completion marks (marks.c)
 *   probe idle-marks SECONDS EVERY_US              marks of a process that does nothing else (marks.c)
 *   probe vmm [MOST_BYTES]                         cost of physical handles (memory.c)
 *   probe pcie [BYTES]                             what the link carries (memory.c)
 *   probe turns SECONDS KERNEL_US GAP_US [host]    an always busy tenant and its gaps (turns.c)
 *   probe ahead SECONDS LAUNCHES KERNEL_US SLOW_US a host that is ahead and behind in turns (turns.c)
 *   probe bursts SECONDS KERNELS KERNEL_US PAUSE_US a little work now and then, and how long it takes (turns.c)
 *   probe blocked SECONDS                          a stream with work behind a wait for the host (turns.c)
 *   probe handles SECONDS BYTES [copy]             physical handles beside a copy or another process (neighbours.c)
 *   probe pins SECONDS BYTES                       page-locking, again and again (neighbours.c)
 *   probe allocs SECONDS BYTES                     each allocation's time (neighbours.c)
 *   probe streams COUNT SECONDS KERNEL_US          launches on several streams in turns (streams.c)
 *   probe destroyed SECONDS                        streams destroyed while others are used (streams.c)
 *   probe captures SECONDS                         graphs captured and launched, checked (streams.c)
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
               {"pcie", mode_pcie},     {"turns", mode_turns},     {"idle-marks", mode_idle_marks}, {"handles", mode_handles},
               {"pins", mode_pins},     {"allocs", mode_allocs},   {"streams", mode_streams}, {"destroyed", mode_destroyed},
               {"captures", mode_captures}, {"ahead", mode_ahead},
               {"bursts", mode_bursts}, {"blocked", mode_blocked}};
  for (size_t i = 0; argc > 1 && i < sizeof modes / sizeof *modes; i++)
    if (!strcmp(argv[1], modes[i].name)) return modes[i].run(argc - 2, argv + 2);
  fprintf(stderr, "probe: unknown mode '%s': there are", argc > 1 ? argv[1] : "");
  for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) fprintf(stderr, "%s %s", i ? "," : "", modes[i].name);
  fprintf(stderr, "\n");
  return 2;
}
