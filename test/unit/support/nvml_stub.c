/* An NVIDIA driver library with two GPUs that are what the files in the folder $NVML_STUB say.
 *
 * mode    absent: works; hang: GPU 1 does not answer, which makes the file "hangs"; hang_all: nothing does;
 *         errors: GPU 1 is lost, GPU 0 has neither ECC nor NVLink
 * pids    "GPU pid bytes" a line: who computes
 * replay  how many replays link 0 of GPU 0 has counted
 * xids    a FIFO; "GPU number" a line is an Xid event
 *
 * Layouts are those of nvml.h, as pynvml has them.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, GPU_IS_LOST = 15 };

typedef unsigned long long u64;
typedef int *device_t;
struct pci { char legacy[16]; unsigned domain, bus, device, pci_device, subsystem; char bus_id[32]; };
struct memory { u64 total, free, used; };
struct rates { unsigned gpu, memory; };
struct process { unsigned pid; u64 used; unsigned instance, compute; };
struct event { device_t device; u64 type, data; unsigned instance, compute; };

static int devices[2] = {0, 1};
static FILE *xids;

static FILE *open_file(const char *name, const char *how) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("NVML_STUB"), name);
    return fopen(path, how);
}

static int is_mode(const char *mode) {
    char text[16] = "";
    FILE *file = open_file("mode", "r");
    if (file) {
        if (fscanf(file, "%15s", text) != 1) text[0] = 0;
        fclose(file);
    }
    return !strcmp(text, mode);
}

int nvmlInitWithFlags(unsigned flags) {
    while (is_mode("hang_all")) pause();
    return SUCCESS;
}

const char *nvmlErrorString(int status) { return status == GPU_IS_LOST ? "GPU is lost" : "some error"; }

int nvmlSystemGetDriverVersion(char *text, unsigned length) { snprintf(text, length, "580.65.06"); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13010; return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) {
    if (index == 1) {
        if (is_mode("hang")) {
            fclose(open_file("hangs", "w"));
            pause();
        }
        if (is_mode("errors")) return GPU_IS_LOST;
    }
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(device_t device, struct pci *info) {
    memset(info, 0, sizeof *info);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%X:00.0", 0x1A + *device);
    return SUCCESS;
}

int nvmlDeviceGetUUID(device_t device, char *text, unsigned length) {
    snprintf(text, length, "GPU-0000000%d-aaaa", *device);
    return SUCCESS;
}

int nvmlDeviceGetName(device_t device, char *text, unsigned length) {
    snprintf(text, length, "NVIDIA H200");
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(device_t device, struct memory *memory) {
    *memory = (struct memory){140ULL << 30, 20ULL << 30, 120ULL << 30};
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(device_t device, struct rates *rates) {
    *rates = (struct rates){97, 40};
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned *count, struct process *processes) {
    unsigned gpu, pid, found = 0;
    u64 used;
    FILE *file = open_file("pids", "r");
    while (file && fscanf(file, "%u %u %llu", &gpu, &pid, &used) == 3)
        if (gpu == (unsigned)*device) {
            if (processes && found < *count) processes[found] = (struct process){pid, used, ~0u, ~0u};
            found++;
        }
    if (file) fclose(file);
    int is_short = found > 0 && !processes;
    *count = found;
    return is_short ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetTemperature(device_t device, unsigned sensor, unsigned *value) { *value = 65; return SUCCESS; }
int nvmlDeviceGetPowerUsage(device_t device, unsigned *value) { *value = 640500; return SUCCESS; }
int nvmlDeviceGetEnforcedPowerLimit(device_t device, unsigned *value) { *value = 700000; return SUCCESS; }
int nvmlDeviceGetClockInfo(device_t device, unsigned type, unsigned *value) { *value = 1000 + type; return SUCCESS; }

/* The name that it had before 535: the newer one is not here. */
int nvmlDeviceGetCurrentClocksThrottleReasons(device_t device, u64 *reasons) {
    *reasons = *device ? 0x1 : 0x40;
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(device_t device, unsigned kind, unsigned since, u64 *count) {
    *count = *device == 1 && kind == 1;
    return is_mode("errors") ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetRemappedRows(device_t device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failure) {
    *corrected = *uncorrected = *pending = *failure = 0;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(device_t device, unsigned link, unsigned *is_up) {
    *is_up = link == 0;
    return is_mode("errors") ? NOT_SUPPORTED : link < 2 ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetNvLinkErrorCounter(device_t device, unsigned link, unsigned counter, u64 *count) {
    FILE *file = open_file("replay", "r");
    *count = 0;
    if (file && *device == 0 && counter == 0 && fscanf(file, "%llu", count) != 1) *count = 0;
    if (file) fclose(file);
    return SUCCESS;
}

int nvmlEventSetCreate(void **set) { *set = devices; return SUCCESS; }

int nvmlDeviceRegisterEvents(device_t device, u64 types, void *set) { return types == 8 ? SUCCESS : INVALID_ARGUMENT; }

int nvmlEventSetWait_v2(void *set, struct event *event, unsigned milliseconds) {
    char path[4096], line[64];
    unsigned gpu, number;
    if (!xids) {
        snprintf(path, sizeof path, "%s/xids", getenv("NVML_STUB"));
        /* With a writer of its own it never ends. */
        xids = fdopen(open(path, O_RDWR), "r");
        setvbuf(xids, NULL, _IONBF, 0);
    }
    struct pollfd ready = {fileno(xids), POLLIN, 0};
    if (!poll(&ready, 1, milliseconds)) return TIMEOUT;
    if (!fgets(line, sizeof line, xids) || sscanf(line, "%u %u", &gpu, &number) != 2) return GPU_IS_LOST;
    *event = (struct event){&devices[gpu], 8, number, ~0u, ~0u};
    return SUCCESS;
}
