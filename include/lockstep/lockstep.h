#pragma once

// Everything that is public. One line per header, one block per layer.
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/data/collate.h"
#include "lockstep/data/data_loader.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/data/sampler.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/process_group.h"
#include "lockstep/launch/launch.h"
#include "lockstep/launch/spawn.h"
#include "lockstep/memory/memory.h"
#include "lockstep/nn/distributed_data_parallel.h"
#include "lockstep/testing/run_ranks.h"
#include "lockstep/version.h"
