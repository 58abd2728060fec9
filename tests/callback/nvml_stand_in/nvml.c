/* A stand-in for libnvidia-ml.so.1: the entry points that gpu_sampler.py calls, answering from a script.
 *
 * The environment variable NVML_SCRIPT names a text file, read again at every call, of lines "<name> <number>":
 *   uuid <n>             the device's UUID is "GPU-<n>" ("MIG-<n>" with mig 1); 0 = unknown to UUID look-up
 *   uuid1 <n>            a second device's, whose values are busy1 and memory1
 *   busy, memory, power_mw, energy_mj, throttle, sm, tensor, dram     values
 *   mig, gpm             0 or 1
 *   <function> <code>    return code of that entry point instead of success
 *   hang <seconds>       nvmlDeviceGetUtilizationRates sleeps that long
 *   calls.<function>     not read: counts are appended to the file NVML_CALLS, one function name a line
 * Struct layouts follow NVIDIA's nvml.h as nvidia-ml-py declares them. Written for the tests of this project.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

typedef struct { unsigned int gpu, memory; } utilization_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { const char *short_name, *long_name, *unit; } metric_info_t;
typedef struct { unsigned int id; int code; double value; metric_info_t info; } metric_t;
typedef struct { unsigned int version, count; void *sample1, *sample2; metric_t metrics[477]; } metrics_get_t;
typedef struct { unsigned int version, supported; } gpm_support_t;

static int device, second_device; /* their addresses are the handles */
static int samples[2];
static int samples_given;

static double scripted(const char *name, double otherwise) {
    const char *path = getenv("NVML_SCRIPT");
    FILE *file = path ? fopen(path, "r") : NULL;
    char key[128];
    double value, found = otherwise;
    if (!file) return otherwise;
    while (fscanf(file, "%127s %lf", key, &value) == 2)
        if (strcmp(key, name) == 0) found = value;
    fclose(file);
    return found;
}

static int answer(const char *function) {
    const char *path = getenv("NVML_CALLS");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) {
        fprintf(file, "%s\n", function);
        fclose(file);
    }
    return (int)scripted(function, SUCCESS);
}

#define ANSWER() do { int code = answer(__func__); if (code) return code; } while (0)

int nvmlInitWithFlags(unsigned int flags) { (void)flags; ANSWER(); return SUCCESS; }
int nvmlInit_v2(void) { ANSWER(); return SUCCESS; }
int nvmlShutdown(void) { ANSWER(); return SUCCESS; }

const char *nvmlErrorString(int code) {
    switch (code) {
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 6: return "Not Found";
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    char expected[64];
    ANSWER();
    snprintf(expected, sizeof expected, "%s-%d", scripted("mig", 0) ? "MIG" : "GPU", (int)scripted("uuid", 1));
    if (scripted("uuid", 1) && strcmp(uuid, expected) == 0) {
        *handle = &device;
        return SUCCESS;
    }
    snprintf(expected, sizeof expected, "GPU-%d", (int)scripted("uuid1", -1));
    if (strcmp(uuid, expected) != 0) return NOT_FOUND;
    *handle = &second_device;
    return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **handle) {
    ANSWER();
    if (strcmp(bus_id, "00000000:3B:00.0") != 0) return NOT_FOUND;
    *handle = &device;
    return SUCCESS;
}

int nvmlDeviceIsMigDeviceHandle(void *handle, unsigned int *is_mig) {
    (void)handle;
    ANSWER();
    *is_mig = (unsigned int)scripted("mig", 0);
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *handle, utilization_t *rates) {
    ANSWER();
    if (scripted("hang", 0)) sleep((unsigned int)scripted("hang", 0));
    rates->gpu = (unsigned int)scripted(handle == &second_device ? "busy1" : "busy", 0);
    rates->memory = 0;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
    ANSWER();
    memory->total = 1ULL << 36;
    memory->used = (unsigned long long)scripted(handle == &second_device ? "memory1" : "memory", 0);
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned int *milliwatts) {
    (void)handle;
    ANSWER();
    *milliwatts = (unsigned int)scripted("power_mw", 0);
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules) {
    (void)handle;
    ANSWER();
    *millijoules = (unsigned long long)scripted("energy_mj", 0);
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons) {
    (void)handle;
    ANSWER();
    *reasons = (unsigned long long)scripted("throttle", 0);
    return SUCCESS;
}

int nvmlGpmQueryDeviceSupport(void *handle, gpm_support_t *support) {
    (void)handle;
    ANSWER();
    support->supported = (unsigned int)scripted("gpm", 0);
    return SUCCESS;
}

int nvmlGpmSampleAlloc(void **sample) {
    ANSWER();
    *sample = &samples[samples_given++ % 2];
    return SUCCESS;
}

int nvmlGpmSampleFree(void *sample) { (void)sample; ANSWER(); return SUCCESS; }
int nvmlGpmSampleGet(void *handle, void *sample) { (void)handle; (void)sample; ANSWER(); return SUCCESS; }

int nvmlGpmMetricsGet(metrics_get_t *request) {
    ANSWER();
    if (request->sample1 == request->sample2) return NOT_SUPPORTED;
    for (unsigned int place = 0; place < request->count; place++) {
        metric_t *metric = &request->metrics[place];
        const char *name = metric->id == 2 ? "sm" : metric->id == 5 ? "tensor" : metric->id == 10 ? "dram" : "";
        metric->value = scripted(name, 0);
        metric->code = *name ? SUCCESS : NOT_SUPPORTED;
    }
    return SUCCESS;
}
