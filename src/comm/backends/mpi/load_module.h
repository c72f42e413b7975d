#pragma once

#include "comm/backends/mpi/module/module.h"

namespace lockstep::comm::mpi {

/// The module, loaded the first time: the file liblockstep_mpi.so beside this
/// library, else where the dynamic loader looks. Throws InvalidArgument that
/// says why it cannot be loaded. Thread safe.
Module& load_module();

}  // namespace lockstep::comm::mpi
