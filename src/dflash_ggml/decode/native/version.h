// Which declarations these are: one more with every change of one, here and in __init__.py, so that Python tells a build of
// other sources from its own.

#define NATIVE_VERSION 4
