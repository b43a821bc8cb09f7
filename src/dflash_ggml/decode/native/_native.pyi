# cffi makes the module at build time; what it holds is declared in the headers beside this file
from typing import Any

ffi: Any
lib: Any
