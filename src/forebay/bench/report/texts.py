"""Everything that the report says, in both languages side by side.

Words in braces are places for values and are the same in both. Names of checks and of fields of the environment are
keys of the records, so a new one is a new line here; what has no line is shown by its own name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from forebay.bench.evidence import Validity
from forebay.bench.gates.stability.options import FaultKind
from forebay.bench.gates.verdicts import Bound, Outcome
from forebay.bench.markup import escaped
from forebay.bench.restore.results import Role


class Language(Enum):
    """By its tag (BCP 47)."""

    ENGLISH = "en"
    CHINESE = "zh-Hans"


@dataclass(frozen=True, slots=True)
class Text:
    en: str
    zh: str


@dataclass(frozen=True, slots=True)
class Voice:
    """Says texts in one language. A call gives markup: the text with its values, all of it escaped."""

    language: Language

    def __call__(self, text: Text, **values: object) -> str:
        return escaped(self.plain(text, **values))

    def plain(self, text: Text, **values: object) -> str:
        """Not escaped: for a place in another text."""
        chosen = text.en if self.language is Language.ENGLISH else text.zh
        return chosen.format(**values)

    def sentences(self, *each: str) -> str:
        """One after the other: Chinese has no blanks between them."""
        return (" " if self.language is Language.ENGLISH else "").join(each)


# ---- the frame

LANGUAGES = {Language.ENGLISH: "English", Language.CHINESE: "中文"}
"""Each in itself: how the switch names them."""
GATES_KIND = Text("Acceptance report", "验收报告")
RESTORE_KIND = Text("Benchmark of cold restores", "冷恢复基准测试")
CREATED = Text("Measured {created}", "测量时间：{created}")
CONTENTS = Text("On this page", "本页内容")
WRITTEN_ELSEWHERE = Text("as recorded, in English", "原始记录，英文")
NOTHING_MEASURED = Text("Nothing was measured.", "没有任何测量结果。")
YES = Text("yes", "是")
NO = Text("no", "否")
UNKNOWN = Text("unknown", "未知")

# ---- verdicts

OUTCOMES = {
    Outcome.PASS: Text("PASS", "通过"),
    Outcome.FAIL: Text("FAIL", "不通过"),
    Outcome.INVALID: Text("INVALID", "无效"),
}
VALIDITIES = {Validity.VALID: Text("VALID", "有效"), Validity.INVALID: Text("INVALID", "无效")}
ALL_GATES_PASS = Text(
    "All gates passed: {gates} of {gates}, with {checks} checks within the limits that were stated beforehand.",
    "全部关卡通过：{gates} / {gates}；{checks} 项检查都在事先写明的限值之内。",
)
SOME_GATES_FAIL = Text(
    "Not accepted: {failed} of {gates} gates failed. What failed, and what could not be judged:",
    "不予验收：{gates} 个关卡中有 {failed} 个不通过。不通过和无法判断的项目：",
)
SOME_GATES_INVALID = Text(
    "Nothing can be said yet: {invalid} of {gates} gates could not be judged. Missing or not to be believed:",
    "尚不能下结论：{gates} 个关卡中有 {invalid} 个无法判断。缺少或不可信的项目：",
)
RUN_IS_VALID = Text(
    "The run is what it says it is: cold reads came from the device, every request succeeded, controls held still.",
    "本次运行名副其实：冷读来自设备，全部请求成功，对照组没有漂移。",
)
RUN_IS_INVALID = Text("The figures of this run must not be used. The reasons:", "本次运行的数字不能采用。原因：")
RESTORE_IS_INVALID = Text(
    "The measurement “{title}” is INVALID, so its figures must not be used. The reasons:",
    "测量“{title}”无效，其数字不能采用。原因：",
)
STOPPED_EARLY = Text("Ended early, as it could not pass any more:", "提前终止，因为已不可能通过：")
CHECK_FOUND = Text("{name}: {measured}, limit {limit}", "{name}：{measured}，限值 {limit}")
NOT_JUDGED = Text("{count} checks that could not be judged", "{count} 项检查无法判断")
CHECK_WITHOUT_SAMPLE = Text("{name}: not measured, limit {limit}", "{name}：未测得，限值 {limit}")

# ---- the headline figure

SOONER = Text(
    "With {concurrency} sessions at once, {group} gives the first token {share} sooner than {against}: "
    "{value} instead of {other} (TTFT p50).",
    "{concurrency} 个会话并发时，{group}的首 token 比{against}早 {share}：{value}，而不是 {other}（TTFT p50）。",
)
LATER = Text(
    "With {concurrency} sessions at once, {group} gives the first token {share} later than {against}: "
    "{value} instead of {other} (TTFT p50).",
    "{concurrency} 个会话并发时，{group}的首 token 比{against}晚 {share}：{value}，而不是 {other}（TTFT p50）。",
)
MORE_TOKENS = Text(
    "The machine puts out {share} more tokens a second: {value} instead of {other}.",
    "整机每秒输出的 token 多 {share}：{value}，而不是 {other}。",
)
FEWER_TOKENS = Text(
    "The machine puts out {share} fewer tokens a second: {value} instead of {other}.",
    "整机每秒输出的 token 少 {share}：{value}，而不是 {other}。",
)
RECOMPUTING = Text("Recomputing takes {value}.", "重新计算需要 {value}。")
OVER_ALL = Text(
    "Over all measured concurrencies ({lowest} to {highest}), TTFT p50 changes by {least} to {most}.",
    "在所有测量的并发（{lowest} 到 {highest}）上，TTFT p50 的变化在 {least} 到 {most} 之间。",
)
TOKENS_EQUAL = Text("Every session got the same output in both.", "每个会话在两者中得到的输出完全相同。")
TOKENS_DIFFER = Text("The outputs were NOT the same in both.", "两者的输出不相同。")
NO_HEADLINE = Text("No two groups can be compared.", "没有可以比较的两组。")
NO_CLAIM = Text("No figure is put first, since the run is INVALID.", "本次运行无效，因此不给出首要数字。")

# ---- groups and the comparison

ROLES = {
    Role.RECOMPUTE: Text("recompute", "重新计算"),
    Role.BASELINE: Text("baseline", "基线"),
    Role.CANDIDATE: Text("candidate", "候选"),
    Role.SHARED: Text("shared pool", "共享池"),
}
ROLES_SAID = {
    Role.RECOMPUTE: Text("recomputing", "重新计算"),
    Role.BASELINE: Text("the baseline", "基线"),
    Role.CANDIDATE: Text("the candidate", "候选"),
    Role.SHARED: Text("the shared pool", "共享池"),
}
"""The same within a sentence."""
GROUP_NAME = Text("{role} ({name})", "{role}（{name}）")
COMPARISON = Text("Comparison", "对比")
COMPARISON_NOTE = Text(
    "Below each figure, in brackets, its 95 % confidence interval. A change is that of the group against {against}; "
    "less is better for TTFT, more for tokens a second.",
    "每个数字下方的方括号内是 95 % 置信区间。变化是该组相对{against}的变化；TTFT 越小越好，每秒 token 越多越好。",
)
TTFT_TABLE = Text("Time to the first token, p50", "首 token 延迟（TTFT）p50")
RATE_TABLE = Text("Output tokens a second, whole machine", "整机每秒输出 token 数")
AT_ONCE = Text("sessions at once", "并发会话数")
CHANGE = Text("{group}: change", "{group}：变化")
OUTPUTS_EQUAL = Text(
    "{group}: at every concurrency each session got the same output as with {against}.",
    "{group}：在每个并发下，每个会话的输出都与{against}相同。",
)
OUTPUTS_DIFFER = Text(
    "{group}: outputs differ from those with {against} at these concurrencies: {steps}.",
    "{group}：在以下并发下输出与{against}不同：{steps}。",
)

# ---- gates

GATES = Text("Gates", "关卡")
GATE_NAMES = {
    "g1": Text("G1 Arrival: the device as promised", "G1 到货：设备是否如约"),
    "g2": Text("G2 Baseline of the single machine", "G2 单机基线"),
    "g3": Text("G3 Main gate: candidate against baseline", "G3 主关卡：候选对基线"),
    "g4": Text("G4 Stability over time", "G4 长时间稳定性"),
}
GATE = Text("gate", "关卡")
VERDICT = Text("verdict", "结论")
CHECKS_PASSED = Text("checks passed", "通过的检查")
BEGAN = Text("began", "开始")
NOT_RUN = Text("not run yet", "尚未运行")
WENT_ON = Text("The run was interrupted and went on:", "运行曾中断并继续：")
WENT_ON_AT = Text("{at}, with forebay {version}", "{at}，forebay {version}")
AFTER_REBOOT = Text("{at}, after a reboot, with forebay {version}", "{at}，重启之后，forebay {version}")
CHANGED = Text("since then {what} is {after}, and no longer {before}", "此后 {what} 由 {before} 变为 {after}")
ATTEMPTS = Text(
    "It was begun {count} times ({times}): those before the last were interrupted.",
    "共开始 {count} 次（{times}）：最后一次之前的均被中断。",
)
TOOK = Text("took", "用时")
CHECKS = Text("Checks", "检查项")
CHECKS_NOTE = Text(
    "The limits are those of the plan further below, which was fixed before the run.",
    "限值来自下文的计划；计划在运行之前已经固定。",
)
CHECK = Text("check", "检查")
MEASURED = Text("measured", "测得")
LIMIT = Text("limit", "限值")
NO_CHECKS = Text("No check was made.", "没有做任何检查。")
FILES = Text("In the bundle, for these checks:", "证据包中与这些检查对应的文件：")
REMARKS = Text("Remarks:", "备注：")
BOUNDS = {
    Bound.AT_MOST: Text("at most {limit}", "不超过 {limit}"),
    Bound.AT_LEAST: Text("at least {limit}", "不低于 {limit}"),
    Bound.EQUAL: Text("exactly {limit}", "恰为 {limit}"),
}
WHERE = Text("{concurrency} at once{group}", "并发 {concurrency}{group}")
BY_CONCURRENCY = (
    "ttft_p50_change",
    "throughput_change",
    "tokens_equal",
    "requests",
    "repeat_drift",
    "throughput_drift",
)
"""Checks that have a concurrency after the `@`, and sometimes a group after that."""
CHECK_NAMES = {
    "repeat_drift": Text("largest over smallest TTFT p50 of the rounds, less 1", "各轮 TTFT p50 最大与最小之比减 1"),
    "throughput_drift": Text(
        "largest over smallest output tokens a second of the rounds, less 1", "各轮每秒输出 token 最大与最小之比减 1"
    ),
    "ttft_p50_change": Text("change of TTFT p50 against the baseline", "TTFT p50 相对基线的变化"),
    "throughput_change": Text("change of output tokens a second against the baseline", "每秒输出 token 相对基线的变化"),
    "read_bandwidth": Text("raw reads of the device", "设备裸读带宽"),
    "write_bandwidth": Text("raw writes of the device", "设备裸写带宽"),
    "read_latency_p99": Text("p99 of reading one block", "读一个块的 p99"),
    "write_latency_p99": Text("p99 of writing one block", "写一个块的 p99"),
    "read_latency_worst": Text("slowest read of one block", "读一个块的最长时间"),
    "write_latency_worst": Text("slowest write of one block", "写一个块的最长时间"),
    "pcie_width": Text("PCIe lanes in use", "在用的 PCIe 通道数"),
    "pcie_gt_per_s": Text("PCIe speed in use", "在用的 PCIe 速率"),
    "numa_node": Text("NUMA node", "NUMA 节点"),
    "speed_mbit_per_s": Text("link speed", "链路速率"),
    "mtu_bytes": Text("MTU of the link", "链路的 MTU"),
    "pause_rx": Text("flow control: obeys pauses (1: yes)", "流控：响应暂停帧（1 为是）"),
    "pause_tx": Text("flow control: sends pauses (1: yes)", "流控：发送暂停帧（1 为是）"),
    "tokens_equal": Text(
        "every output equal to that of the baseline, or of the group named (1: yes)",
        "全部输出与基线（或所列组）一致（1 为是）",
    ),
    "failed_requests": Text("requests that failed", "失败的请求"),
    "requests": Text("requests with a record of their own", "有逐条记录的请求"),
    "wrong_bytes": Text("wrong bytes returned", "返回的错误字节"),
    "wrong_tokens": Text("tokens in wrong blocks", "错误块中的 token"),
    "roots_on_disk": Text("roots that lie on a disk", "位于磁盘上的根目录"),
    "unsound_rests": Text(
        "times at rest with something left over (pins, slots, half-written blocks)",
        "静止时仍有残留（引用、槽、半写的块）的次数",
    ),
    "crashes": Text("unplanned ends of a worker", "工作进程的意外终止"),
    "unexpected_errors": Text("errors that no fault explains", "不能由故障解释的错误"),
    "rss_growth": Text("growth of a worker's memory", "工作进程内存的增长"),
    "descriptor_growth": Text("growth of a worker's open descriptors", "工作进程打开的描述符的增长"),
    "pool_bytes": Text("most that the pool occupied, against its capacity", "缓存池占用的最大值（对其容量）"),
    "miscounted_bytes": Text("bytes in the pool that its catalogue counts wrongly", "目录册计数有误的池内字节"),
    "temporary_files_left": Text("temporary files left behind", "遗留的临时文件"),
    "shm_segments_left": Text("shared memory segments left behind", "遗留的共享内存段"),
    "p99_drift": Text("p99 of loads in the last window, over that in the first", "末段加载 p99 与首段之比"),
    "disk_loads": Text("loads that brought something from disk", "从磁盘取回内容的加载次数"),
    "last_disk_loads": Text("loads from disk in the last window", "末段从磁盘取回内容的加载次数"),
    "load_time": Text("time under load", "加载运行的时间"),
    "fault_seen": Text("times that a fault reached the product", "故障作用到产品的次数"),
}
"""By the part of a check's name before the `@`."""

# ---- figures

PICTURES = Text("In pictures", "图示")
TTFT_PICTURE = Text("Time to the first token (p50) by concurrency", "首 token 延迟（p50）随并发的变化")
RATE_PICTURE = Text("Output tokens a second by concurrency", "每秒输出 token 数随并发的变化")
INTERVALS = Text(
    "The values are in the tables of the comparison. Upright bars are 95 % confidence intervals.",
    "数值见“对比”的表格。竖线是 95 % 置信区间。",
)
LOGARITHMIC = Text("The axis is logarithmic.", "坐标轴为对数。")
SERIES = Text("{group}: {values}.", "{group}：{values}。")
AT_CONCURRENCY = Text("{concurrency} at once: {value}", "并发 {concurrency}：{value}")
BANDWIDTH_PICTURE = Text(
    "Reads at the block layer over time, {concurrency} at once", "块设备层读带宽随时间的变化，并发 {concurrency}"
)
BANDWIDTH_OF = Text("{group}: peak {peak}, {waves} waves.", "{group}：峰值 {peak}，{waves} 波。")
BANDWIDTH_NOTE = Text("One line a wave; the middle round in full colour.", "每波一条线；中间一轮用实色。")
DISTRIBUTION_PICTURE = Text(
    "Share of requests whose first token had come, {concurrency} at once",
    "首 token 已到达的请求所占比例，并发 {concurrency}",
)
DISTRIBUTION_OF = Text(
    "{group}: from {fastest} to {slowest}, {requests} requests.",
    "{group}：从 {fastest} 到 {slowest}，{requests} 个请求。",
)
WITHOUT_TOKEN = Text("{failed} of them without a first token.", "其中 {failed} 个没有首 token。")
OF_OTHERS = Text(
    "{count} of them read another instance's session: from {fastest} to {slowest}.",
    "其中 {count} 个读取其他实例的会话：从 {fastest} 到 {slowest}。",
)
THINNED = Text("Of lines with more than {points} points, a part is drawn.", "超过 {points} 个点的线只画出一部分。")
SECONDS_AXIS = Text("TTFT, s", "TTFT，秒")
TIME_AXIS = Text("seconds since the wave began", "自该波开始的秒数")
TOKENS_AXIS = Text("tokens/s", "token/秒")
BANDWIDTH_AXIS = Text("GB/s", "GB/秒")
SHARE_AXIS = Text("% of requests", "请求的 %")

LOADS_PICTURE = Text("Loads from disk over time", "磁盘加载耗时随时间的变化")
LOAD_AXIS = Text("a load, s", "一次加载，秒")
P99_CURVE = Text("p99 (solid)", "p99（实线）")
P50_CURVE = Text("p50 (dashed)", "p50（虚线）")
MEMORY_PICTURE = Text("Memory of the largest worker over time", "最大工作进程的内存随时间的变化")
LARGEST_WORKER = Text("resident", "驻留内存")
POOL_PICTURE = Text("Bytes in the pool over time", "缓存池占用随时间的变化")
POOL_CURVE = Text("occupied", "占用")
BYTES_AXIS = Text("GB", "GB（十亿字节）")
HOURS_AXIS = Text("hours of load", "加载时间，小时")
MINUTES_AXIS = Text("minutes of load", "加载时间，分钟")
LOAD_SECONDS_AXIS = Text("seconds of load", "加载时间，秒")
CURVE = Text("{name}: from {least} to {most}.", "{name}：从 {least} 到 {most}。")
FAULTS = {
    FaultKind.KILL: Text("killed worker", "杀死工作进程"),
    FaultKind.FULL: Text("full disk", "磁盘写满"),
    FaultKind.SLOW: Text("slow device", "设备变慢"),
    FaultKind.LOST: Text("lost root", "存储根丢失"),
    FaultKind.PULLED: Text("pulled device", "拔出设备"),
}
STRIKES = Text("Upright lines are faults: {strikes}.", "竖线是故障：{strikes}。")

# ---- all figures of a cell

ALL_FIGURES = Text("All figures", "全部数字")
WITH_AT_ONCE = Text("{concurrency} sessions at once", "{concurrency} 个会话并发")
REQUESTS = Text("requests (failed)", "请求（失败）")
ROUNDS = Text("rounds", "轮数")
TTFT_MEAN = Text("TTFT mean", "TTFT 平均")
TTFT_P50 = Text("TTFT p50", "TTFT p50")
TTFT_P50_OWN = Text("TTFT p50, sessions it stored itself", "TTFT p50，自己存储的会话")
TTFT_P50_OTHERS = Text("TTFT p50, sessions of other instances", "TTFT p50，其他实例存储的会话")
TTFT_P90 = Text("TTFT p90", "TTFT p90")
TTFT_P99 = Text("TTFT p99", "TTFT p99")
TTFT_ROUNDS = Text("TTFT p50 of each round", "各轮的 TTFT p50")
TPOT_P50 = Text("TPOT p50", "TPOT p50")
END_TO_END_P50 = Text("end to end, p50", "端到端 p50")
OUTPUT_RATE = Text("output tokens a second", "每秒输出 token")
HIT_TOKENS = Text("hit tokens", "命中 token")
PEAK_RATE = Text("block-layer reads, peak", "块设备层读带宽，峰值")
BUSY_RATE = Text("block-layer reads, busy mean", "块设备层读带宽，忙时平均")
CORE_SECONDS = Text("core-seconds a GB", "每 GB 的核秒")
REQUEST_CORE_SECONDS = Text("core-seconds a request", "每个请求的核秒")

# ---- evidence

EVIDENCE = Text("Evidence", "证据")
RECORD_NOTES = Text("Notes", "说明")
WAVES = Text("What was read, per group and concurrency", "各组、各并发实际读取的数据")
WAVES_NOTE = Text(
    "Sums over all waves; resident, foreign and clock are those of the worst wave. Cold means that both counters show "
    "at least {share} of the wanted bytes.",
    "为各波之和；驻留、外来和时钟取最差一波。两个计数器都显示读到所需字节的至少 {share}，才称为冷读。",
)
GROUP = Text("group", "组")
WAVE_COUNT = Text("waves", "波数")
WANTED = Text("wanted", "应读")
PROCESS_READ = Text("process read", "进程读取")
DEVICE_READ = Text("device read", "设备读取")
RESIDENT = Text("in page cache before", "事先在页缓存")
FOREIGN = Text("moved by others", "他人读写")
CLOCK = Text("clock step", "时钟跳变")
GROUPS = Text("What was compared", "比较的对象")
ROLE = Text("role", "角色")
TARGET = Text("kind of target", "被测目标的类型")
TARGETS = {
    "emulated": Text(
        "emulated accelerator (timed compute; real KV bytes, store and disk)",
        "模拟加速器（计算按时间表；KV 字节、存储与磁盘为真实）",
    ),
    "builtin": Text("built-in transformers engine", "内置 transformers 引擎"),
    "openai": Text("OpenAI-compatible endpoints", "OpenAI 兼容端点"),
}
INSTANCES = Text("instances", "实例数")
MEDIUM = Text("medium", "介质")
MEDIUM_FOUND = Text(
    "{path}: {filesystem} on {source}, block device {device}", "{path}：{filesystem}，位于 {source}，块设备 {device}"
)
MOUNT_OPTIONS = Text("mount options", "挂载选项")
DEVICE = Text("device, as the system describes it", "设备（系统所述）")
NO_MEDIUM = Text("none on this machine", "本机上没有")
STORED = Text("what is stored", "存储的内容")
STORED_SAMPLE = Text(
    "{files} stored files were looked at: {duplicates} have the bytes of another, and they compress to {share}",
    "抽查了 {files} 个存储文件：{duplicates} 个与其他文件字节相同，压缩后为 {share}",
)
WORKLOAD = Text("workload", "负载")

# ---- environment, plan, verification

ENVIRONMENT = Text("Environment", "环境")
ENVIRONMENT_OF = Text("Of “{title}”", "“{title}”")
ENVIRONMENT_FIELDS = {
    "cpu_model": Text("CPU", "CPU"),
    "cpus": Text("logical processors", "逻辑处理器"),
    "usable_cpus": Text("of them usable", "其中可用"),
    "virtual_machine": Text("virtual machine", "虚拟机"),
    "memory_bytes": Text("memory", "内存"),
    "kernel": Text("kernel", "内核"),
    "python": Text("Python", "Python"),
    "packages": Text("software", "软件"),
    "transparent_huge_pages": Text("transparent huge pages", "透明大页"),
    "accelerators": Text("accelerators", "加速器"),
    "network": Text("network ports", "网络端口"),
}
"""By the field's name in the record."""
PLAN = Text("The plan, as it was read", "计划原文")
PLAN_DIGEST = Text("SHA-256 of the plan: {digest}", "计划的 SHA-256：{digest}")
OPTIONS = Text("Options of “{title}”", "“{title}”的选项")
COMMAND = Text("Command", "命令")
VERIFY = Text("How to verify this", "如何核实")
VERIFY_STEPS = (
    Text(
        "The bundle (zip) holds this record, the per-request records and a manifest with the SHA-256 of every file. "
        "“forebay bundle verify BUNDLE.zip” recomputes all of them and checks the signature, if there is one. One "
        "changed byte, a file more or a file less is a failure.",
        "证据包（zip）内有本记录、逐请求记录和一份清单，清单列出每个文件的 SHA-256。“forebay bundle verify BUNDLE.zip”"
        "会全部重新计算，并检查签名（若有）。改动一个字节、多一个或少一个文件，都会核实失败。",
    ),
    Text(
        "Compare the SHA-256 of the plan above with that of the plan which both sides agreed on before the run.",
        "把上面计划的 SHA-256 与双方在运行之前商定的计划的 SHA-256 相比较。",
    ),
    Text(
        "“forebay report RECORD.json” makes this page again from the record: the page holds no figure that the record "
        "does not give.",
        "“forebay report RECORD.json”会由记录重新生成本页：页中没有记录之外的数字。",
    ),
    Text(
        "The per-request records (JSONL) have every request's times, tokens and output digest: all figures above can "
        "be recomputed from them.",
        "逐请求记录（JSONL）包含每个请求的时间、token 数和输出摘要：上面的数字都可以由它们重新算出。",
    ),
)

MADE_FROM_BUNDLE = Text(
    "This page was made from a bundle that verified. SHA-256 of its manifest: {digest}.",
    "本页由核实无误的证据包生成。其清单的 SHA-256：{digest}。",
)
SIGNED = Text("Signed by the Ed25519 keys: {signers}.", "签名的 Ed25519 公钥：{signers}。")
NOT_SIGNED = Text("It was not signed.", "当时没有签名。")

# ---- definitions

READING = Text("Definitions", "定义")
DEFINITIONS = (
    (
        Text("TTFT", "TTFT"),
        Text(
            "from sending a request to its first token. It contains queueing, the restore, and the computation of what "
            "was not restored.",
            "从发出请求到首个 token。包括排队、恢复，以及未恢复部分的计算。",
        ),
    ),
    (
        Text("TPOT", "TPOT"),
        Text(
            "from the first token to the last, divided by the tokens after the first.",
            "从首个 token 到最后一个 token 的时间，除以首个之后的 token 数。",
        ),
    ),
    (
        Text("End to end", "端到端"),
        Text("from sending a request to its last token.", "从发出请求到最后一个 token。"),
    ),
    (
        Text("Output tokens a second", "每秒输出 token"),
        Text(
            "all output tokens of a wave, over the time until the last instance had ended: that of the whole machine.",
            "一波的全部输出 token，除以最后一个实例结束所用的时间：是整机的数字。",
        ),
    ),
    (
        Text("p50, p90, p99", "p50、p90、p99"),
        Text(
            "the time within which this share of the requests had their first token; p50 is the median.",
            "在此时间之内，这一比例的请求已得到首个 token；p50 即中位数。",
        ),
    ),
    (
        Text("Confidence interval", "置信区间"),
        Text(
            "95 %, by the bootstrap: requests (for tokens a second, rounds) are drawn anew many times, and the middle "
            "95 % of the outcomes is shown.",
            "95 %，用自助法（bootstrap）：对请求（每秒 token 则对轮）多次重新抽样，给出结果的中间 95 %。",
        ),
    ),
    (
        Text("Session, wave, round", "会话、波、轮"),
        Text(
            "a session is a long context that was stored; a wave asks for as many of them at once as the concurrency "
            "says, each session once; the groups take turns, and a round is one turn of all.",
            "会话是一段已存储的长上下文；一波按并发数同时请求这么多会话，每个会话只读一次；各组轮流进行，全部轮完为一"
            "轮。",
        ),
    ),
    (
        Text("Recompute, baseline, candidate", "重新计算、基线、候选"),
        Text(
            "recompute stores nothing and computes every prompt; the baseline is the medium in use today; the "
            "candidate is what is to be accepted. A shared pool is the candidate under several instances, each "
            "reading its own sessions and the others'.",
            "重新计算不存储任何东西，每个提示都重新算；基线是现用的介质；候选是待验收的介质。共享池是多个实例共用候选，"
            "各自读取自己和其他实例的会话。",
        ),
    ),
    (
        Text("VALID, INVALID", "有效、无效"),
        Text(
            "a measurement is VALID only if it is shown to be what it says: reads were physical and from cold "
            "storage, data was unique and incompressible, every request succeeded with equal output, controls did not "
            "drift. Else it is INVALID, with the reason.",
            "只有证明名副其实的测量才是有效的：读取是物理的、来自冷存储，数据唯一且不可压缩，每个请求都成功且输出相同"
            "，对照组没有漂移。否则无效，并给出原因。",
        ),
    ),
    (
        Text("PASS, FAIL, INVALID", "通过、不通过、无效"),
        Text(
            "a gate FAILS if any check is outside its limit, is INVALID if any check has no sample to be believed, and "
            "PASSES otherwise. Without samples there is no PASS.",
            "任何一项检查超出限值，关卡即不通过；任何一项检查没有可信的样本，关卡即无效；否则通过。没有样本就没有通过"
            "。",
        ),
    ),
    (
        Text("Units", "单位"),
        Text(
            "1 GB is 1,000,000,000 bytes; bandwidths are decimal too.", "1 GB 为 1,000,000,000 字节；带宽同样用十进制。"
        ),
    ),
)
"""A term and what it means."""
