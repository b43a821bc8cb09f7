# A CUDA build must still import where no driver is installed, so the module must not need libcuda at load time.
# ggml links CUDA::cuda_driver for a dozen calls. The target of that name made here opens the driver on the first call;
# find_package(CUDAToolkit) leaves a target that already exists alone.
enable_language(C)
add_library(CUDA::cuda_driver INTERFACE IMPORTED GLOBAL)
find_package(CUDAToolkit REQUIRED)

add_library(dflash_cuda_driver STATIC ${CMAKE_CURRENT_SOURCE_DIR}/cmake/cuda_driver.c)
target_include_directories(dflash_cuda_driver PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
set_target_properties(dflash_cuda_driver PROPERTIES
    POSITION_INDEPENDENT_CODE ON C_VISIBILITY_PRESET hidden)
target_link_libraries(dflash_cuda_driver PUBLIC ${CMAKE_DL_LIBS})
target_link_libraries(CUDA::cuda_driver INTERFACE dflash_cuda_driver)

# the toolkit's libraries are looked for where they were at build time, then in NVIDIA's Python packages, which lie beside ours:
# seen from the binding's folder, and from that of the package dflash-ggml-cu13 within it
set(DFLASH_RPATH "$ORIGIN/../../../nvidia/cu13/lib;$ORIGIN/../../../../nvidia/cu13/lib")
