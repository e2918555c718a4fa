/* A driver on a machine without a device, that is newer than what we know, and lacks most of it: its functions and its data
 * of names that no table has are a program's to find. */
#define VISIBLE __attribute__((visibility("default")))

VISIBLE int cudbgFutureFlag = 4242;
VISIBLE int cuInit(unsigned flags) { return flags ? 1 : 100; }
VISIBLE int cuDriverGetVersion(int *version) {
    *version = 99000;
    return 0;
}
VISIBLE int cuFutureCall(int by) { return cudbgFutureFlag += by; }
VISIBLE int futureWithoutPrefix(void) { return 7; }
