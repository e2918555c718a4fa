/* Asks NVIDIA's runtime for the number of devices: on the way it resolves every driver function that it knows. What it then
 * answers (it judges the driver, and refuses one that is not NVIDIA's) is printed and is nobody's business here. */
#include <stdio.h>
int cudaGetDeviceCount(int *);
int main(void) {
    int count = -1;
    printf("%d\n", cudaGetDeviceCount(&count));
    return 0;
}
