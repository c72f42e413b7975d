// Precompiled once for all tests.
#include <gtest/gtest.h>
#include <torch/torch.h>
