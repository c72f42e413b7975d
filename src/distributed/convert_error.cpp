#include "distributed/convert_error.h"

#include <c10/util/Exception.h>

#include <type_traits>

namespace lockstep::distributed {
namespace {

bool says_timeout(const std::string& text) {
  for (const char* word : {"imeout", "imed out"}) {
    if (text.find(word) != std::string::npos) return true;
  }
  return false;
}

/// `own`, with `other` in place of what it does not tell.
ErrorContext completed(ErrorContext own, const ErrorContext& other) {
  if (own.operation.empty()) own.operation = other.operation;
  if (own.group.empty()) own.group = other.group;
  if (own.backend.empty()) own.backend = other.backend;
  if (own.rank < 0) own.rank = other.rank;
  if (own.world_size == 0) own.world_size = other.world_size;
  return own;
}

/// Rethrows the current exception with the completed context if it is of one of
/// the types.
template <class... Types>
void rethrow_completed(const ErrorContext& context) {
  const auto as = [&]<class E>(std::type_identity<E>) {
    try {
      throw;
    } catch (const E& error) {
      throw E(error.message(), completed(error.context(), context));
    } catch (...) {
    }
  };
  (as(std::type_identity<Types>()), ...);
}

}  // namespace

void rethrow_converted(ErrorContext context) {
  std::string text;
  try {
    throw;
  } catch (const BackendError& e) {
    throw BackendError(e.message(), completed(e.context(), context), e.code());
  } catch (const Error&) {
    rethrow_completed<InvalidArgument,
                      Unsupported,
                      TimeoutError,
                      PeerLost,
                      MismatchError,
                      StoreError>(context);
    throw;
  } catch (const c10::NotImplementedError& e) {
    throw Unsupported(e.what_without_backtrace(), std::move(context));
  } catch (const c10::ValueError& e) {
    throw InvalidArgument(e.what_without_backtrace(), std::move(context));
  } catch (const c10::DistStoreError& e) {
    text = e.what_without_backtrace();
    if (!says_timeout(text)) throw StoreError(text, std::move(context));
  } catch (const c10::Error& e) {
    text = e.what_without_backtrace();
  } catch (const std::exception& e) {
    text = e.what();
  }
  if (says_timeout(text)) throw TimeoutError(text, std::move(context));
  throw BackendError(text, std::move(context));
}

}  // namespace lockstep::distributed
