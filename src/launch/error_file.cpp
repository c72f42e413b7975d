#include "launch/error_file.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <string_view>
#include <system_error>

#include "lockstep/core/error.h"

namespace lockstep::launcher {
namespace {

constexpr size_t kMaxBytes = 64 * 1024;
/// Ours, beside torchrun's "message" and "timestamp".
constexpr std::string_view kConsequence = "\"lockstep_consequence\":true";
constexpr std::string_view kTime = "\"lockstep_time\":";

std::string json_escaped(const std::string& text) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string escaped;
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      escaped += {'\\', c};
    } else if (c == '\n') {
      escaped += "\\n";
    } else if (static_cast<unsigned char>(c) < ' ') {
      escaped += "\\u00";
      escaped += {kDigits[c / 16], kDigits[c % 16]};
    } else {
      escaped += c;
    }
  }
  return escaped;
}

/// The JSON string that begins at `text[start]`, behind its quotation mark.
/// Escapes of characters outside ASCII become '?'.
std::string json_string(const std::string& text, size_t start) {
  std::string value;
  for (size_t i = start; i < text.size() && text[i] != '"'; ++i) {
    if (text[i] != '\\') {
      value += text[i];
      continue;
    }
    if (++i == text.size()) break;
    switch (text[i]) {
      case 'n':
        value += '\n';
        break;
      case 't':
        value += '\t';
        break;
      case 'u':
        value += '?';
        i += 4;
        break;
      default:
        value += text[i];
    }
  }
  return value;
}

}  // namespace

ErrorFile::ErrorFile() : fd_(::memfd_create("lockstep-error", MFD_CLOEXEC)) {
  if (!fd_) {
    throw LaunchError("cannot make a worker's error file: " +
                      std::generic_category().message(errno));
  }
}

std::string ErrorFile::path() const {
  return "/proc/" + std::to_string(::getpid()) + "/fd/" +
         std::to_string(fd_.get());
}

RecordedError ErrorFile::read() const {
  std::string bytes(kMaxBytes, '\0');
  const ssize_t size = ::pread(fd_.get(), bytes.data(), bytes.size(), 0);
  bytes.resize(size > 0 ? static_cast<size_t>(size) : 0);
  RecordedError error = {
      .message = error_message(bytes),
      .consequence = bytes.find(kConsequence) != std::string::npos};
  if (const auto time = bytes.find(kTime); time != std::string::npos) {
    error.time = Clock::time_point(Clock::duration(
        std::strtoll(bytes.c_str() + time + kTime.size(), nullptr, 10)));
  }
  return error;
}

void record_error(const std::string& message, bool consequence) noexcept {
  const char* path = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (path == nullptr) return;
  try {
    std::ofstream file(path);
    file << "{\"message\":\"" << json_escaped(message.substr(0, kMaxBytes / 8))
         << "\",\"timestamp\":" << std::time(nullptr);
    if (consequence) file << ',' << kConsequence;
    file << ',' << kTime << Clock::now().time_since_epoch().count() << '}';
  } catch (const std::exception&) {
    // The error itself is on stderr.
  }
}

std::string error_message(const std::string& json) {
  static const std::string kKey = "\"message\":";
  size_t position = json.find(kKey);
  while (position != std::string::npos) {
    position = json.find_first_not_of(" \n\t", position + kKey.size());
    if (position == std::string::npos) break;
    if (json[position] == '"') return json_string(json, position + 1);
    position = json.find(kKey, position);
  }
  return {};
}

}  // namespace lockstep::launcher
