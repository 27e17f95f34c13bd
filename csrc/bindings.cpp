// The Python module fastdp._C: the functions of fastdp.h on raw pointers passed as integers (tensor.data_ptr()).
#include <pybind11/pybind11.h>

void bind_matrix(pybind11::module_ &);  // bind_matrix.cpp
void bind_stream(pybind11::module_ &module);

PYBIND11_MODULE(_C, module) {
    module.doc() = "Compiled functions of fastdp; see csrc/fastdp.h";
    bind_matrix(module);
    bind_stream(module);
}
