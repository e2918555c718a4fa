#!/bin/sh
# Stands in for the arbiter in tests of its start: `arbiter --embedded --runtime-dir DIR ...` runs
# the script next to DIR. A file of the repository, because a script that a test has just written
# may still be open in a child of another.
. "$4/../arbiter.sh"
