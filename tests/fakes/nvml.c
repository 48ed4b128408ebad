/* A driver that is not there: the part of NVML that agents ask for, told by a small text file.
 *
 * FAIRWAY_FAKE_NVML names the file; it is read again whenever it changes. One word and its values a line:
 *
 *   driver 570.124.06            of the machine
 *   cuda 12080                   the newest that it knows, as NVML writes 12.8
 *   refuse 18                    what nvmlInit gives instead of success
 *   gpu                          begins a GPU; the lines up to the next one are about it
 *   uuid GPU-1  |  name NVIDIA H200  |  bus 00000000:1A:00.0  |  capability 9 0
 *   memory TOTAL RESERVED USED   in MiB
 *   use 40  |  watts 310  |  joules 9000  |  celsius 50  |  throttle 0x40
 *   ecc 0                        uncorrected errors since the driver was loaded
 *   rows 0 1 0 0                 remapped rows: corrected, uncorrected, pending, failed
 *   retired 1                    retired pages wait for a reset
 *   process PID MIB              of CUDA, and   graphics PID MIB, and   mps PID MIB of a client
 *   nvlink gpu N  |  nvlink switch   one active link to the GPU of that place, or to a switch
 *   near N LEVEL                 common ancestor with the GPU of that place, as NVML numbers levels
 *   slice UUID PROFILE MIB       a MIG slice of it
 *   lost                         it fell off the bus
 *   event SERIAL TYPE DATA       told once to who waits, in order of SERIAL: type 8 is an XID, DATA its number
 *
 * A GPU without a line for something answers "not supported" to that question.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, BAD = 2, UNSUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, NOT_LOADED = 9, TIMEOUT = 10, LOST = 15 };
enum { GPUS = 16, MANY = 64, TEXT = 96 };

typedef struct { unsigned pid; unsigned long long bytes; unsigned instance, compute; } process;
typedef struct { unsigned long long serial, type, data; int gpu; } event;
typedef struct gpu {
    struct gpu *parent;
    char uuid[TEXT], name[TEXT], bus[32], profile[TEXT];
    int place, number, lost, has_ecc, has_rows, has_retired, has_throttle, has_use, has_watts, has_joules;
    int has_celsius, capability[2], links[MANY], link_count, near[GPUS], slice_count, counts[3];
    unsigned rows[4], retired, use, watts, celsius, joules;
    unsigned long long total, reserved, used, ecc, throttle;
    process processes[3][MANY];
    struct gpu *slices[8];
} gpu;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci;
typedef struct { gpu *device; unsigned long long type, data; unsigned instance, compute; } event_data;
typedef struct { unsigned long long seen; } event_set;

static gpu gpus[GPUS], slices[GPUS][8];
static event events[MANY];
static int gpu_count, event_count, refused;
static char driver[TEXT];
static int cuda;
static struct stat seen;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void line_of(gpu *at, char *word, char *rest) {
    unsigned long long a = 0, b = 0, c = 0;
    char one[TEXT] = "", two[TEXT] = "";
    int n = sscanf(rest, "%llu %llu %llu", &a, &b, &c);
    if (!strcmp(word, "cuda")) cuda = (int)a;
    if (!strcmp(word, "driver")) { snprintf(driver, TEXT, "%s", rest); return; }
    if (!strcmp(word, "refuse")) refused = (int)a;
    if (!at) return;
    if (!strcmp(word, "uuid")) snprintf(at->uuid, TEXT, "%s", rest);
    else if (!strcmp(word, "name")) snprintf(at->name, TEXT, "%s", rest);
    else if (!strcmp(word, "bus")) snprintf(at->bus, sizeof at->bus, "%s", rest);
    else if (!strcmp(word, "capability")) { at->capability[0] = (int)a; at->capability[1] = (int)b; }
    else if (!strcmp(word, "memory")) { at->total = a << 20; at->reserved = b << 20; at->used = c << 20; }
    else if (!strcmp(word, "use")) { at->use = a; at->has_use = 1; }
    else if (!strcmp(word, "watts")) { at->watts = a; at->has_watts = 1; }
    else if (!strcmp(word, "joules")) { at->joules = a; at->has_joules = 1; }
    else if (!strcmp(word, "celsius")) { at->celsius = a; at->has_celsius = 1; }
    else if (!strcmp(word, "throttle")) { at->throttle = strtoull(rest, NULL, 0); at->has_throttle = 1; }
    else if (!strcmp(word, "ecc")) { at->ecc = a; at->has_ecc = 1; }
    else if (!strcmp(word, "retired")) { at->retired = a; at->has_retired = 1; }
    else if (!strcmp(word, "lost")) at->lost = 1;
    else if (!strcmp(word, "near") && n == 2 && a < GPUS) at->near[a] = (int)b;
    else if (!strcmp(word, "rows"))
        at->has_rows = sscanf(rest, "%u %u %u %u", at->rows, at->rows + 1, at->rows + 2, at->rows + 3) == 4;
    else if (!strcmp(word, "nvlink") && at->link_count < MANY)
        at->links[at->link_count++] = sscanf(rest, "gpu %d", &n) == 1 ? n : -1;
    else if (!strcmp(word, "process") || !strcmp(word, "graphics") || !strcmp(word, "mps")) {
        int kind = *word == 'g' ? 1 : *word == 'm' ? 2 : 0;
        if (at->counts[kind] < MANY)
            at->processes[kind][at->counts[kind]++] = (process){a, b << 20, ~0u, ~0u};
    } else if (!strcmp(word, "event") && event_count < MANY)
        events[event_count++] = (event){a, b, c, at->place};
    else if (!strcmp(word, "slice") && at->slice_count < 8 && sscanf(rest, "%95s %95s %llu", one, two, &a) == 3) {
        gpu *slice = &slices[at->place][at->slice_count];
        memset(slice, 0, sizeof *slice);
        slice->parent = at;
        slice->number = at->slice_count + 1;
        slice->total = a << 20;
        snprintf(slice->uuid, TEXT, "%s", one);
        snprintf(slice->profile, TEXT, "%s", two);
        at->slices[at->slice_count++] = slice;
    }
}

/* Reads the file when it is another one than last time. The caller holds the lock. */
static int look(void) {
    const char *path = getenv("FAIRWAY_FAKE_NVML");
    struct stat now;
    if (!path || stat(path, &now)) return NOT_LOADED;
    if (now.st_ino == seen.st_ino && now.st_size == seen.st_size && now.st_mtim.tv_sec == seen.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return OK;
    FILE *file = fopen(path, "r");
    if (!file) return NOT_LOADED;
    char line[256], word[32];
    gpu_count = event_count = refused = 0;
    memset(gpus, 0, sizeof gpus);
    while (fgets(line, sizeof line, file)) {
        int at = 0;
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "%31s %n", word, &at) < 1) continue;
        if (!strcmp(word, "gpu") && gpu_count < GPUS) { gpus[gpu_count].place = gpu_count; gpu_count++; }
        else line_of(gpu_count ? &gpus[gpu_count - 1] : NULL, word, line + at);
    }
    fclose(file);
    seen = now;
    return OK;
}

/* An answer is worked out under the lock, for a device that is there. */
#define ANSWER(...) \
    pthread_mutex_lock(&lock); \
    int result = look(); \
    if (result == OK) { __VA_ARGS__; } \
    pthread_mutex_unlock(&lock); \
    return result;
#define OF_DEVICE(...) \
    ANSWER(gpu *whole = device->parent ? device->parent : device; if (whole->lost) result = LOST; else { __VA_ARGS__; })
#define TOLD(known, ...) \
    if (known) { __VA_ARGS__; } else result = UNSUPPORTED

int nvmlInitWithFlags(unsigned flags) { (void)flags; ANSWER(result = refused) }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "told by the stand-in"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { ANSWER(snprintf(text, size, "%s", driver)) }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { ANSWER(TOLD(cuda, *version = cuda)) }
int nvmlDeviceGetCount_v2(unsigned *count) { ANSWER(*count = gpu_count) }
int nvmlDeviceGetHandleByIndex_v2(unsigned at, gpu **device) {
    ANSWER(if (at >= (unsigned)gpu_count) result = BAD; else { *device = &gpus[at]; if (gpus[at].lost) result = LOST; })
}
int nvmlDeviceGetHandleByUUID(const char *uuid, gpu **device) {
    ANSWER(result = NOT_FOUND; for (int i = 0; i < gpu_count; i++) {
        if (!strcmp(gpus[i].uuid, uuid)) { *device = &gpus[i]; result = gpus[i].lost ? LOST : OK; }
        for (int j = 0; j < gpus[i].slice_count; j++)
            if (!strcmp(slices[i][j].uuid, uuid)) { *device = &slices[i][j]; result = gpus[i].lost ? LOST : OK; }
    })
}
int nvmlDeviceGetUUID(gpu *device, char *text, unsigned size) { OF_DEVICE(snprintf(text, size, "%s", device->uuid)) }
int nvmlDeviceGetName(gpu *device, char *text, unsigned size) {
    OF_DEVICE(if (device->parent) snprintf(text, size, "%s MIG %s", whole->name, device->profile);
              else snprintf(text, size, "%s", device->name))
}
int nvmlDeviceGetPciInfo_v3(gpu *device, pci *info) {
    OF_DEVICE(TOLD(*whole->bus, memset(info, 0, sizeof *info); snprintf(info->bus_id, 32, "%s", whole->bus);
                   sscanf(whole->bus, "%x:%x:%x", &info->domain, &info->bus, &info->device)))
}
int nvmlDeviceGetMemoryInfo(gpu *device, unsigned long long *memory) {
    OF_DEVICE(memory[0] = device->total; memory[2] = device->used + device->reserved; memory[1] = memory[0] - memory[2])
}
int nvmlDeviceGetMemoryInfo_v2(gpu *device, unsigned long long *memory) {
    if ((unsigned)memory[0] != 0x02000028) return 25;
    OF_DEVICE(memory[1] = device->total; memory[2] = device->reserved; memory[4] = device->used;
              memory[3] = device->total - device->reserved - device->used)
}
int nvmlDeviceGetCudaComputeCapability(gpu *device, int *major, int *minor) {
    OF_DEVICE(TOLD(device->capability[0], *major = device->capability[0]; *minor = device->capability[1]))
}
int nvmlDeviceGetUtilizationRates(gpu *device, unsigned *rates) {
    OF_DEVICE(TOLD(device->has_use, rates[0] = device->use; rates[1] = 0))
}
int nvmlDeviceGetPowerUsage(gpu *device, unsigned *mw) { OF_DEVICE(TOLD(device->has_watts, *mw = device->watts * 1000)) }
int nvmlDeviceGetTotalEnergyConsumption(gpu *device, unsigned long long *mj) {
    OF_DEVICE(TOLD(device->has_joules, *mj = device->joules * 1000ull))
}
int nvmlDeviceGetTemperature(gpu *device, unsigned sensor, unsigned *celsius) {
    OF_DEVICE(TOLD(device->has_celsius && sensor == 0, *celsius = device->celsius))
}
int nvmlDeviceGetMigMode(gpu *device, unsigned *now, unsigned *next) {
    OF_DEVICE(TOLD(!device->parent, *now = *next = device->slice_count > 0))
}
int nvmlDeviceGetMaxMigDeviceCount(gpu *device, unsigned *count) { OF_DEVICE(*count = device->slice_count ? 7 : 0) }
int nvmlDeviceGetMigDeviceHandleByIndex(gpu *device, unsigned at, gpu **slice) {
    OF_DEVICE(if (at >= (unsigned)device->slice_count) result = NOT_FOUND; else *slice = device->slices[at])
}
int nvmlDeviceGetGpuInstanceId(gpu *device, unsigned *id) { OF_DEVICE(TOLD(device->parent, *id = device->number)) }
int nvmlDeviceGetTopologyCommonAncestor(gpu *device, gpu *other, unsigned *level) {
    OF_DEVICE(TOLD(device->near[other->place], *level = device->near[other->place]))
}
int nvmlDeviceGetP2PStatus(gpu *device, gpu *other, unsigned kind, unsigned *status) {
    OF_DEVICE(*status = 5; if (kind == 2) for (int i = 0; i < device->link_count; i++)
        for (int j = 0; j < other->link_count; j++)
            if (device->links[i] == other->place || (device->links[i] < 0 && other->links[j] < 0)) *status = 0)
}
int nvmlDeviceGetNvLinkState(gpu *device, unsigned link, unsigned *active) {
    OF_DEVICE(TOLD(device->link_count, *active = link < (unsigned)device->link_count))
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(gpu *device, unsigned link, pci *info) {
    OF_DEVICE(if (link >= (unsigned)device->link_count) result = UNSUPPORTED; else {
        memset(info, 0, sizeof *info);
        int to = device->links[link];
        snprintf(info->bus_id, 32, "%s", to < 0 ? "00000000:C1:00.0" : gpus[to].bus);
    })
}
int nvmlDeviceGetNvLinkRemoteDeviceType(gpu *device, unsigned link, unsigned *type) {
    OF_DEVICE(if (link >= (unsigned)device->link_count) result = UNSUPPORTED; else *type = device->links[link] < 0 ? 2 : 0)
}
int nvmlDeviceGetTotalEccErrors(gpu *device, unsigned type, unsigned counter, unsigned long long *count) {
    OF_DEVICE(TOLD(whole->has_ecc && type == 1 && counter == 0, *count = whole->ecc))
}
int nvmlDeviceGetRemappedRows(gpu *device, unsigned *a, unsigned *b, unsigned *pending, unsigned *failed) {
    OF_DEVICE(TOLD(whole->has_rows, *a = whole->rows[0]; *b = whole->rows[1]; *pending = whole->rows[2];
                   *failed = whole->rows[3]))
}
int nvmlDeviceGetRetiredPagesPendingStatus(gpu *device, unsigned *pending) {
    OF_DEVICE(TOLD(whole->has_retired, *pending = whole->retired))
}
int nvmlDeviceGetCurrentClocksEventReasons(gpu *device, unsigned long long *reasons) {
    OF_DEVICE(TOLD(whole->has_throttle, *reasons = whole->throttle))
}
static int list_of(gpu *device, int kind, unsigned *count, process *found) {
    OF_DEVICE(int room = *count; *count = device->counts[kind]; if (device->counts[kind] > room) result = SMALL;
              else memcpy(found, device->processes[kind], sizeof(process) * device->counts[kind]))
}
int nvmlDeviceGetComputeRunningProcesses_v3(gpu *device, unsigned *count, process *found) {
    return list_of(device, 0, count, found);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(gpu *device, unsigned *count, process *found) {
    return list_of(device, 1, count, found);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(gpu *device, unsigned *count, process *found) {
    return list_of(device, 2, count, found);
}
int nvmlDeviceGetSupportedEventTypes(gpu *device, unsigned long long *types) { OF_DEVICE(*types = 0x1f) }
int nvmlEventSetCreate(event_set **set) {
    ANSWER(*set = calloc(1, sizeof **set);
           for (int i = 0; i < event_count; i++) if (events[i].serial > (*set)->seen) (*set)->seen = events[i].serial)
}
int nvmlDeviceRegisterEvents(gpu *device, unsigned long long types, event_set *set) {
    (void)set;
    OF_DEVICE(if (types & ~0x1full) result = UNSUPPORTED)
}
static int next_of(event_set *set, event_data *told) {
    ANSWER(event *first = NULL; result = TIMEOUT; for (int i = 0; i < event_count; i++)
        if (events[i].serial > set->seen && (!first || events[i].serial < first->serial)) first = &events[i];
        if (first) {
            set->seen = first->serial;
            *told = (event_data){&gpus[first->gpu], first->type, first->data, ~0u, ~0u};
            result = OK;
        })
}
int nvmlEventSetWait_v2(event_set *set, event_data *told, unsigned timeout_ms) {
    for (unsigned waited = 0;; waited += 100) {
        int result = next_of(set, told);
        if (result != TIMEOUT || waited >= timeout_ms) return result;
        usleep(100000); /* seldom: a real driver wakes nobody for nothing */
    }
}
int nvmlEventSetFree(event_set *set) { free(set); return OK; }
