/* A library that needs the driver and says nothing. */
int needs_driver(void) { return 1; }
