// A tool that listens to NVTX, as Nsight Systems does: writes every range of every domain to stdout.
//
// NVTX loads the library that NVTX_INJECTION64_PATH names and calls InitializeInjectionNvtx2 with a function that yields
// its tables of callbacks. Numbers and layouts are those of NVTX 3, in nvtxDetail/nvtxTypes.h and nvToolsExt.h.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

using Function = void (*)();

struct Callbacks {
  size_t struct_size;
  int (*get_module_table)(int module, Function*** table, unsigned* size);
};

struct EventAttributes {
  uint16_t version, size;
  uint32_t category;
  int32_t color_type;
  uint32_t color;
  int32_t payload_type, reserved;
  uint64_t payload;
  int32_t message_type;
  const char* message;  // a registered string: what register_string returned
};

constexpr int kCallbacksTable = 1;
constexpr int kDomains = 5;  // the module NVTX_CB_MODULE_CORE2
enum { kRangePush = 4, kRangePop = 5, kRegisterString = 10, kCreateDomain = 12 };

const char* create_domain(const char* name) { return strdup(name); }

const char* register_string(const char*, const char* text) { return strdup(text); }

int push_range(const char* domain, const EventAttributes* event) {
  std::printf("push %s@%s\n", event->message, domain);
  std::fflush(stdout);
  return 0;
}

int pop_range(const char* domain) {
  std::printf("pop @%s\n", domain);
  std::fflush(stdout);
  return 0;
}

}  // namespace

extern "C" int InitializeInjectionNvtx2(const void* (*get_table)(uint32_t)) {
  const auto* callbacks = static_cast<const Callbacks*>(get_table(kCallbacksTable));
  Function** table = nullptr;
  unsigned size = 0;
  if (callbacks == nullptr || !callbacks->get_module_table(kDomains, &table, &size) || size <= kCreateDomain) return 0;
  *table[kCreateDomain] = reinterpret_cast<Function>(create_domain);
  *table[kRegisterString] = reinterpret_cast<Function>(register_string);
  *table[kRangePush] = reinterpret_cast<Function>(push_range);
  *table[kRangePop] = reinterpret_cast<Function>(pop_range);
  return 1;
}
