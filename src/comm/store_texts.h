#pragma once

#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "core/clock.h"

/// Texts that ranks leave for each other in a store. Its errors are StoreErrors
/// here.
namespace lockstep::comm {

/// Runs what uses the store; its errors as StoreError.
void with_store(const std::function<void()>& use);

void set_text(c10d::Store& store,
              const std::string& key,
              const std::string& text);

/// The texts under the keys of `ranks`, in order. Waits for them and calls
/// `look`, which may throw, now and then.
/// \throws TimeoutError  names the ranks whose texts did not come
std::vector<std::string> texts_of(
    c10d::Store& store,
    const std::vector<int>& ranks,
    const std::function<std::string(int rank)>& key_of,
    const Deadline& deadline,
    const std::function<void()>& look);

}  // namespace lockstep::comm
