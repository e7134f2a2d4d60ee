// What the stand-in is told to be, how its calls begin, and what it counts.
//
// Settings come when the library is loaded: by the environment, so that child processes have them too, or from a file beside the library, as
// NAME=VALUE a line, so that a copy of it can be another driver in the same process. Tests in one process have the functions at the end
// of standin.cpp besides.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

using u64 = std::uint64_t;

// The file of this library with `.settings` behind its name.
std::map<std::string, std::string> read_settings() {
    std::map<std::string, std::string> found;
    Dl_info info;
    static const int here = 0;
    if (!dladdr(&here, &info) || !info.dli_fname) return found;
    std::ifstream lines(std::string(info.dli_fname) + ".settings");
    for (std::string line; std::getline(lines, line);)
        if (const auto equals = line.find('='); equals != line.npos) found[line.substr(0, equals)] = line.substr(equals + 1);
    return found;
}
std::string text_setting(const char *name, const char *otherwise) {
    static const std::map<std::string, std::string> beside = read_settings();
    const char *value = std::getenv(name);
    if (value && *value) return value;
    const auto found = beside.find(name);
    return found == beside.end() ? otherwise : found->second;
}
long setting(const char *name, long otherwise) {
    return std::atol(text_setting(name, std::to_string(otherwise).c_str()).c_str());
}

struct Settings {
    int version = setting("PDKV_STANDIN_VERSION", 13000);
    int init = setting("PDKV_STANDIN_INIT", 0);       // what cuInit returns
    int devices = setting("PDKV_STANDIN_DEVICES", 2);
    std::string name = text_setting("PDKV_STANDIN_NAME", "Stand-in H200");
    int major = setting("PDKV_STANDIN_MAJOR", 9);     // compute capability
    int multiprocessors = setting("PDKV_STANDIN_MULTIPROCESSORS", 3);
    bool peers = setting("PDKV_STANDIN_PEERS", 1);    // whether devices reach each other
    bool strict = setting("PDKV_STANDIN_STRICT", 0);  // whether addresses are looked up in a context only, and of
                                                      // host memory less is told
    bool vmm = setting("PDKV_STANDIN_VMM", 1);        // whether there is memory that descriptors name
    bool pools = setting("PDKV_STANDIN_POOLS", 1);    // whether there is memory in the order of a stream
    long free_mib = setting("PDKV_STANDIN_FREE_MIB", 1 << 17);
    std::string slow = text_setting("PDKV_STANDIN_SLOW", "copy_bulk");  // kernels with this in their names take long
    bool open = setting("PDKV_STANDIN_OPEN", 0);      // whether the CPU may touch device memory
    int flush = setting("PDKV_STANDIN_FLUSH", 1);     // whether the host can have it see what adapters have written (bit 0)
    int ordering = setting("PDKV_STANDIN_ORDERING", 0);  // for whom it sees that by itself: 100 itself, 200 all
    int hold = setting("PDKV_STANDIN_HOLD", 0);       // 1: nothing that is asked happens, 2: no kernel runs
    bool eager = setting("PDKV_STANDIN_EAGER", 0);    // whether what is asked happens at once
    std::vector<int> visible;                         // the devices that this process may see, as CUDA_VISIBLE_DEVICES says

    Settings() {
        const char *named = std::getenv("CUDA_VISIBLE_DEVICES");
        if (!named) {
            for (int device = 0; device < devices; ++device) visible.push_back(device);
            return;
        }
        std::istringstream words(named);
        for (std::string word; std::getline(words, word, ',');) {
            const int device = std::atoi(word.c_str());
            if (word.find_first_not_of("0123456789") != std::string::npos || device >= devices) break;
            visible.push_back(device);
        }
    }
    // The number of a device in this process; -1 where it is hidden.
    int ordinal(int device) const {
        for (std::size_t at = 0; at < visible.size(); ++at)
            if (visible[at] == device) return static_cast<int>(at);
        return -1;
    }
};
// What lasts is never destroyed: at the end of a process other threads may still be in here.
Settings &settings = *new Settings;

std::mutex lock;
std::condition_variable &released = *new std::condition_variable;  // from a hold

std::map<std::string, long> &alive = *new std::map<std::string, long>;  // and, as `calls NAME`, how often a call was made
std::string &report = *new std::string;
int process = 0;  // that called cuInit
int sticky = 0;   // what every call returns since something failed on the device

struct Failure {
    std::string call;
    long nth;  // 0: every time
    int status;
};
std::vector<Failure> &failures = *new std::vector<Failure>;

void fail(const std::string &call, long nth, int status) {
    failures.push_back({call, nth, status});
}
struct FailuresOfEnvironment {
    FailuresOfEnvironment() {
        std::istringstream list(text_setting("PDKV_STANDIN_FAIL", ""));
        for (std::string item; std::getline(list, item, ',');) {
            std::istringstream parts(item);
            std::string call, nth, status;
            std::getline(parts, call, ':'), std::getline(parts, nth, ':'), std::getline(parts, status, ':');
            fail(call, std::atol(nth.c_str()), status.empty() ? 999 : std::atoi(status.c_str()));
        }
    }
} failures_of_environment;

// Whether this is the time at which `call` is to fail, and how.
int failing(const std::string &call) {
    for (auto failure = failures.begin(); failure != failures.end(); ++failure) {
        if (failure->call != call) continue;
        const int status = failure->status;
        if (failure->nth == 0) return status;
        if (--failure->nth > 0) continue;
        failures.erase(failure);
        return status;
    }
    return 0;
}

// Somebody captures a graph, in the mode that torch takes. Calls that might wait, or free, fail then, and break the capture, unless the thread says that
// they are no part of it.
bool capturing = setting("PDKV_STANDIN_CAPTURE", 0);
thread_local int capture_mode = 0;
const std::set<std::string> IN_NO_CAPTURE = {
    "cuEventQuery",    "cuEventSynchronize", "cuStreamQuery",         "cuStreamSynchronize", "cuMemAlloc_v2",    "cuMemFree_v2",
    "cuMemHostAlloc",  "cuMemFreeHost",      "cuMemHostRegister_v2",  "cuMemHostUnregister", "cuModuleLoadData", "cuModuleUnload",
    "cuIpcCloseMemHandle", "cuIpcOpenMemHandle_v2", "cuMemCreate",    "cuMemMap",            "cuMemUnmap",       "cuMemSetAccess"};

// How every call begins: only in the process that started the driver, and not after something has failed on the device.
int begin(const char *call) {
    ++alive[std::string("calls ") + call];
    if (process != getpid()) return 3;  // CUDA_ERROR_NOT_INITIALIZED
    if (const int status = failing(call)) return status;
    const bool anyway = std::strcmp(call, "cuCtxSynchronize") == 0;  // waits for the captured stream too
    if (capturing && (anyway || (capture_mode != 2 && IN_NO_CAPTURE.count(call)))) {
        ++alive["broken captures"];
        return 900;  // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    }
    return sticky;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) int
#define CALL(NAME)                               \
    std::unique_lock<std::mutex> guard(lock);    \
    if (const int status = begin(#NAME)) return status
#define CALL_IN_CONTEXT(NAME) \
    CALL(NAME);               \
    if (entered.empty()) return 201 /* CUDA_ERROR_INVALID_CONTEXT */
