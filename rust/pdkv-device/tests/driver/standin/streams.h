// Streams: what is asked of one happens in its order and of two in none, at the latest moment that the waits allow.
//
// A call that waits for a stream does what is left in it, and what that waits for in others. A call that only asks how far a stream is
// brings it on by one step, so that whoever keeps asking sees an end. An eager stand-in does the opposite: all happens as soon as it is asked,
// so that whoever asks nothing sees an end too.
#pragma once

#include <time.h>

#include <deque>
#include <utility>

#include "memory.h"

namespace {

// Lower numbers come first. These are none that anybody would guess.
constexpr int LOWEST_PRIORITY = 2, HIGHEST_PRIORITY = -3;

struct Stream;
using StreamPtr = std::shared_ptr<Stream>;

struct Step {
    std::function<void()> what;
    std::string kernel;  // its name; empty for anything else
    StreamPtr other;   // a step that waits: for this stream
    std::size_t upto;  // to have done as many steps
};

// A slow kernel takes this by the clock of its stream alone, so that which of two is faster is no matter of how busy this machine is.
constexpr double SLOW_MS = 10'000;

struct Stream {
    unsigned flags;
    int device;
    std::size_t asked = 0, done = 0;
    std::deque<Step> steps;
    bool captured = false;
    double pretended_ms = 0;
};

struct Event {
    unsigned flags;
    StreamPtr stream;
    std::size_t at;
    std::shared_ptr<double> passed_ms;
};

struct Context {
    int device = 0, retained = 0;
    StreamPtr default_stream;
};
std::map<int, Context> &contexts = *new std::map<int, Context>;
// Other libraries call while a thread, or the process, is taken apart.
thread_local std::vector<Context *> &entered = *new std::vector<Context *>;
std::map<void *, StreamPtr> &streams = *new std::map<void *, StreamPtr>;

// 0, 1 and 2 are names of the default stream.
bool address_is_default(void *handle) {
    return reinterpret_cast<u64>(handle) <= 2;
}
StreamPtr stream_of(void *handle) {
    const auto found = streams.find(handle);
    if (found != streams.end()) return found->second;
    if (!address_is_default(handle)) return nullptr;
    StreamPtr &stream = entered.back()->default_stream;
    if (!stream) stream = StreamPtr(new Stream{0, entered.back()->device, 0, 0, {}, false, 0});
    return stream;
}

bool held(const Step &step) {
    return settings.hold == 1 || (settings.hold == 2 && !step.kernel.empty());
}

// Does one step, or one of a stream that it waits for; false while that is held back.
bool step(Stream &stream) {
    if (stream.done == stream.asked) return false;
    Step &next = stream.steps.front();
    if (next.other && next.other->done < next.upto) return step(*next.other);
    if (held(next)) return false;
    if (next.what && !sticky) {
        sticky = failing("run");
        if (!sticky) {
            std::unique_ptr<Spoiler> spoiler;
            const bool kernel = !next.kernel.empty();
            std::string call = "wrong";
            int wrong = kernel ? failing(call) : 0;
            if (kernel && !wrong) wrong = failing(call = "wrong " + next.kernel);
            if (wrong) spoiler.reset(new Spoiler);
            {
                Running running(kernel ? stream.device : -1);
                next.what();
            }
            if (spoiler && !spoiler->spoil()) fail(call, 1, wrong);  // nothing changed: the next one, then
        }
    }
    stream.steps.pop_front();
    ++stream.done;
    return true;
}

// Adds a step, and goes on to it where that is how this stand-in is.
void append(const StreamPtr &stream, Step what) {
    stream->steps.push_back(std::move(what));
    ++stream->asked;
    while (settings.eager && step(*stream)) continue;
}
int ask(void *handle, std::function<void()> what, const std::string &kernel = "") {
    const StreamPtr stream = stream_of(handle);
    if (!stream) return 400;  // CUDA_ERROR_INVALID_HANDLE
    append(stream, {std::move(what), kernel, nullptr, 0});
    return 0;
}

// Brings a stream to a point, and waits as long as that is held back.
void progress(std::unique_lock<std::mutex> &guard, const StreamPtr &stream, std::size_t upto) {
    while (stream->done < upto)
        if (!step(*stream)) released.wait(guard);
}
std::vector<StreamPtr> all_streams() {
    std::vector<StreamPtr> all;
    for (const auto &[handle, stream] : streams) all.push_back(stream);
    for (const auto &[device, context] : contexts)
        if (context.default_stream) all.push_back(context.default_stream);
    return all;
}
void progress_all(std::unique_lock<std::mutex> &guard) {
    for (const StreamPtr &stream : all_streams()) progress(guard, stream, stream->asked);
}
// What an eager stand-in has to catch up on.
void catch_up() {
    for (const StreamPtr &stream : all_streams())
        while (settings.eager && step(*stream)) continue;
}

double now_ms() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

}  // namespace

// The default stream can't be used while a stream that waits for it is captured; one that does not, like torch's, leaves it alone.
bool default_is_captured() {
    bool named = false;
    for (const auto &[handle, stream] : streams) {
        named = named || stream->captured;
        if (stream->captured && stream->flags != 1) return true;
    }
    return capturing && !named;
}

API cuCtxGetStreamPriorityRange(int *lowest, int *highest) {
    CALL_IN_CONTEXT(cuCtxGetStreamPriorityRange);
    *lowest = LOWEST_PRIORITY, *highest = HIGHEST_PRIORITY;
    return 0;
}
API cuStreamCreateWithPriority(void **handle, unsigned flags, int priority) {
    CALL_IN_CONTEXT(cuStreamCreateWithPriority);
    const StreamPtr stream(new Stream{flags, entered.back()->device, 0, 0, {}, false, 0});
    *handle = stream.get();
    streams[*handle] = stream;
    ++alive["streams"];
    if (flags != 1) ++alive["blocking streams"];
    if (priority < LOWEST_PRIORITY) ++alive["urgent streams"];
    return 0;
}
// Not of pdkv's, but of whoever else links the driver.
API cuStreamCreate(void **handle, unsigned flags) {
    return cuStreamCreateWithPriority(handle, flags, LOWEST_PRIORITY);
}
API cuStreamDestroy_v2(void *handle) {
    CALL_IN_CONTEXT(cuStreamDestroy_v2);
    const auto found = streams.find(handle);
    if (found == streams.end()) return 400;
    const StreamPtr stream = found->second;
    progress(guard, stream, stream->asked);
    streams.erase(handle);
    --alive["streams"];
    return sticky;
}
API cuStreamSynchronize(void *handle) {
    CALL_IN_CONTEXT(cuStreamSynchronize);
    const StreamPtr stream = stream_of(handle);
    if (!stream) return 400;
    progress(guard, stream, stream->asked);
    return sticky;
}
API cuStreamQuery(void *handle) {
    CALL_IN_CONTEXT(cuStreamQuery);
    const StreamPtr stream = stream_of(handle);
    if (!stream) return 400;
    if (stream->asked == stream->done) return 0;
    step(*stream);
    return sticky ? sticky : 600;
}
API cuStreamIsCapturing(void *handle, int *found) {
    CALL_IN_CONTEXT(cuStreamIsCapturing);
    const StreamPtr stream = stream_of(handle);
    if (!stream) return 400;
    if (address_is_default(handle) && default_is_captured()) return 906;  // CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    *found = stream->captured;
    return 0;
}
API cuThreadExchangeStreamCaptureMode(int *mode) {
    CALL(cuThreadExchangeStreamCaptureMode);
    std::swap(*mode, capture_mode);
    return 0;
}
API cuCtxSynchronize() {
    CALL_IN_CONTEXT(cuCtxSynchronize);
    progress_all(guard);
    return sticky;
}
API cuStreamWaitEvent(void *handle, void *event, unsigned flags) {
    CALL_IN_CONTEXT(cuStreamWaitEvent);
    const StreamPtr stream = stream_of(handle);
    const Event &awaited = *static_cast<Event *>(event);
    if (!stream || flags) return 1;
    ++alive["waits"];
    if (awaited.stream && awaited.stream != stream) {
        append(stream, {nullptr, "", awaited.stream, awaited.at});
    }
    return 0;
}
API cuStreamWriteValue64_v2(void *handle, u64 address, u64 value, unsigned flags) {
    CALL_IN_CONTEXT(cuStreamWriteValue64_v2);
    if (flags || address % 8) return 1;
    return ask(handle, [=] { *reinterpret_cast<volatile u64 *>(address) = value; });
}
API cuEventCreate(void **event, unsigned flags) {
    CALL_IN_CONTEXT(cuEventCreate);
    if (flags & ~3u) return 1;
    *event = new Event{flags, nullptr, 0, nullptr};
    ++alive["events"];
    return 0;
}
API cuEventDestroy_v2(void *event) {
    CALL_IN_CONTEXT(cuEventDestroy_v2);
    delete static_cast<Event *>(event);
    --alive["events"];
    return 0;
}
API cuEventRecord(void *event, void *handle) {
    CALL_IN_CONTEXT(cuEventRecord);
    Event &recorded = *static_cast<Event *>(event);
    const StreamPtr stream = stream_of(handle);
    if (!stream) return 400;
    if (!(recorded.flags & 2)) {
        const auto passed_ms = recorded.passed_ms = std::make_shared<double>(-1);
        ask(handle, [passed_ms, clock = stream.get()] { *passed_ms = now_ms() + clock->pretended_ms; });
    }
    recorded.stream = stream, recorded.at = stream->asked;
    return 0;
}
API cuEventQuery(void *event) {
    CALL_IN_CONTEXT(cuEventQuery);
    const Event &asked = *static_cast<Event *>(event);
    if (!asked.stream || asked.stream->done >= asked.at) return 0;
    step(*asked.stream);
    return sticky ? sticky : 600;
}
API cuEventSynchronize(void *event) {
    CALL_IN_CONTEXT(cuEventSynchronize);
    const Event awaited = *static_cast<Event *>(event);
    if (awaited.stream) progress(guard, awaited.stream, awaited.at);
    return sticky;
}
API cuEventElapsedTime(float *milliseconds, void *from, void *to) {
    CALL_IN_CONTEXT(cuEventElapsedTime);
    const Event &first = *static_cast<Event *>(from), &second = *static_cast<Event *>(to);
    if (!first.passed_ms || !second.passed_ms) return 400;
    if (*first.passed_ms < 0 || *second.passed_ms < 0) return 600;
    *milliseconds = static_cast<float>(*second.passed_ms - *first.passed_ms);
    return 0;
}
