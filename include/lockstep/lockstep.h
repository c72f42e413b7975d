#pragma once

// Everything that is public. One line per header, one block per layer.

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/safetensors.h"

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

#include "lockstep/data/collate.h"
#include "lockstep/data/data_loader.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/data/sampler.h"

#include "lockstep/distributed/coalesced.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/device_mesh.h"
#include "lockstep/distributed/functional.h"
#include "lockstep/distributed/monitored_barrier.h"
#include "lockstep/distributed/new_group.h"
#include "lockstep/distributed/object_collectives.h"
#include "lockstep/distributed/point_to_point.h"
#include "lockstep/distributed/process_group.h"
#include "lockstep/distributed/uneven.h"

#include "lockstep/launch/launch.h"
#include "lockstep/launch/serializer.h"
#include "lockstep/launch/spawn.h"

#include "lockstep/memory/memory.h"

#include "lockstep/nn/distributed_data_parallel.h"

#include "lockstep/testing/run_ranks.h"

#include "lockstep/version.h"
