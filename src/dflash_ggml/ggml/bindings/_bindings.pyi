# cffi makes the module at build time; what it holds is declared in cdef/
from typing import Any

ffi: Any
lib: Any
