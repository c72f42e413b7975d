#include "distributed/convert_error.h"

#include <c10/util/Exception.h>

namespace lockstep::distributed {
namespace {

bool says_timeout(const std::string& text) {
  for (const char* word : {"imeout", "imed out"}) {
    if (text.find(word) != std::string::npos) return true;
  }
  return false;
}

}  // namespace

void rethrow_converted(ErrorContext context) {
  std::string text;
  try {
    throw;
  } catch (const Error&) {
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
