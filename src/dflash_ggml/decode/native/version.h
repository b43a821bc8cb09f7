// Version of the declarations: incremented with every change, here and in __init__.py, so that Python
// detects a build of other sources.

#define NATIVE_VERSION 6
