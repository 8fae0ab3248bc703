"""What records say of themselves in English sentences, such as why they are INVALID, in the report's other language.

A record keeps its sentences as they were written. Here each has the pattern that it was made by: words in braces are
values, kept as they are, and `{said}` is a saying within it, translated too. What has no pattern stays in English.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from forebay.bench.markup import escaped
from forebay.bench.report.texts import Language, Text, Voice

_READS = (
    Text("nothing was read from cold disk", "没有从冷盘读取任何数据"),
    Text(
        "physical reads cannot be shown: what is restored does not lie on this machine",
        "无法证明是物理读取：被恢复的数据不在本机上",
    ),
    Text(
        "physical reads cannot be shown: the kernel does not say what this process read",
        "无法证明是物理读取：内核不提供本进程的读取量",
    ),
    Text(
        "physical reads cannot be shown: the kernel does not say what the device read",
        "无法证明是物理读取：内核不提供设备的读取量",
    ),
    Text("physical reads cannot be shown: {said}", "无法证明是物理读取：{said}"),
    Text(
        "the cold reads were not physical: this process read {share} of the working set from disk",
        "冷读不是物理读取：本进程只从磁盘读了工作集的 {share}",
    ),
    Text(
        "the cold reads were not physical: the device read {share} of the working set from disk",
        "冷读不是物理读取：设备只从磁盘读了工作集的 {share}",
    ),
    Text("the mount table cannot be read", "无法读取挂载表"),
    Text("{path} is on {filesystem}, which keeps files in memory", "{path} 位于 {filesystem}，它把文件放在内存里"),
    Text("{path} is on {filesystem}, which has no local block device", "{path} 位于 {filesystem}，它没有本地块设备"),
    Text(
        "no block device is known under {path} ({filesystem} on {source})",
        "{path} 之下没有已知的块设备（{filesystem}，位于 {source}）",
    ),
    Text(
        "{path} is on an overlay whose disk is not visible from here; use a volume",
        "{path} 位于 overlay 上，从这里看不到其磁盘；请使用卷",
    ),
    Text("the devices under {name} are stacked too deep to follow", "{name} 之下的设备层数过多，无法追踪"),
    Text("the block device {name} is memory", "块设备 {name} 是内存"),
)
"""Of `forebay.bench.evidence`."""

_AUDIT = (
    Text("there is no sample at concurrency {step}", "并发 {step} 没有样本"),
    Text(
        "{have} of {wanted} rounds at concurrency {step}: too few to say how well they repeat",
        "并发 {step} 只有 {have} 轮（需要 {wanted} 轮）：太少，无法判断重复性",
    ),
    Text("round {round} at concurrency {step} has {count} requests", "并发 {step} 的第 {round} 轮有 {count} 个请求"),
    Text(
        "round {round} at concurrency {step} read a session more than once",
        "并发 {step} 的第 {round} 轮不止一次读取了同一会话",
    ),
    Text(
        "{failed} of {count} requests failed, the first with: {error}",
        "{count} 个请求中有 {failed} 个失败，首个错误：{error}",
    ),
    Text("{mute} of {count} requests gave no token", "{count} 个请求中有 {mute} 个没有给出 token"),
    Text("{odd} of {count} requests have times that cannot be", "{count} 个请求中有 {odd} 个的时间不可能成立"),
    Text(
        "output tokens differ in {unequal} of {count} sessions, such as {session}: {counts}",
        "{count} 个会话中有 {unequal} 个的输出 token 数不一致，例如会话 {session}：{counts}",
    ),
    Text(
        "prompt tokens differ in {unequal} of {count} sessions, such as {session}: {counts}",
        "{count} 个会话中有 {unequal} 个的提示 token 数不一致，例如会话 {session}：{counts}",
    ),
    Text(
        "{restored} of {count} requests found tokens, where all were to be computed",
        "{count} 个请求中有 {restored} 个命中了 token，而本应全部计算",
    ),
    Text("of {count} requests it cannot be told whether all was computed", "有 {count} 个请求无法得知是否全部经过计算"),
    Text(
        "{others} of {count} requests were restored from elsewhere than cold storage: {names}",
        "{count} 个请求中有 {others} 个不是从冷存储恢复的：{names}",
    ),
    Text(
        "of {count} requests it cannot be told which tier they were restored from",
        "有 {count} 个请求无法得知是从哪一层恢复的",
    ),
    Text("of {count} requests it cannot be told how much was restored", "有 {count} 个请求无法得知恢复了多少"),
    Text("{idle} of {count} requests had nothing to restore", "{count} 个请求中有 {idle} 个没有可恢复的内容"),
    Text(
        "{short} of {count} requests were not restored in full, such as session {session}: {hit} of {stored} tokens",
        "{count} 个请求中有 {short} 个没有完整恢复，例如会话 {session}：{stored} 个 token 中的 {hit} 个",
    ),
    Text(
        "{warm} of {count} waves began with a warm page cache: up to {size} of what was to be read lay in memory",
        "{count} 波中有 {warm} 波开始时页缓存是热的：待读数据中最多有 {size} 在内存里",
    ),
    Text("of {count} waves it cannot be told whether the page cache was warm", "有 {count} 波无法得知页缓存是否是热的"),
    Text("nothing that is stored was found to look at", "没有找到可供检查的存储内容"),
    Text(
        "{duplicates} of {count} stored blocks that were looked at have the bytes of another: a device may keep such "
        "bytes once",
        "抽查的 {count} 个存储块中有 {duplicates} 个与其他块字节相同：设备可能只保存一份",
    ),
    Text(
        "what is stored compresses to {share}: a device may keep and read less than it seems to",
        "存储内容可压缩到 {share}：设备实际保存和读取的可能比看上去少",
    ),
    Text(
        "the clock jumped during {jumped} of {count} waves, by up to {step} s",
        "{count} 波中有 {jumped} 波期间时钟跳变，最多 {step} 秒",
    ),
    Text("{count} waves took no time", "有 {count} 波没有用时"),
    Text(
        "others used the device during {busy} of {count} waves, and moved up to {size}",
        "{count} 波中有 {busy} 波期间有他人使用设备，最多读写了 {size}",
    ),
    Text(
        "of {count} waves it cannot be told whether others used the device", "有 {count} 波无法得知是否有他人使用设备"
    ),
    Text(
        "this control drifted by {drift} at concurrency {step}, where {limit} is allowed",
        "该对照组在并发 {step} 漂移了 {drift}，允许 {limit}",
    ),
    Text("{said} (and {more} more like it in {count} waves)", "{said}（在 {count} 波中另有 {more} 处类似）"),
)
"""Of `forebay.bench.restore.audit`: reasons."""

_NOTES = (
    Text("Outputs differ between {pair}.", "输出不一致：{pair}。"),
    Text(
        "{group}: reads are held to {rate} by software: the medium is emulated.",
        "{group}：读取由软件限制在 {rate}：介质是模拟的。",
    ),
    Text(
        "A session was read up to {times} times: a device with a cache of its own may have had it from there.",
        "同一会话最多被读取 {times} 次：自带缓存的设备可能是从缓存给出的。",
    ),
    Text(
        "At {steps} at once p99 stands on {count} requests or little more: below {enough} it is hardly another figure "
        "than the longest of them.",
        "并发 {steps} 的 p99 只基于约 {count} 个请求：少于 {enough} 个时，它几乎就是其中最长的一个。",
    ),
    Text(
        "The limit {name} was laxer than usual: {value}, and not {usual}.",
        "限值 {name} 比通常宽松：{value}，而不是 {usual}。",
    ),
    Text(
        "This is a virtual machine: reads were physical as far as its own kernel goes; the host beneath may have "
        "caches of its own.",
        "这是虚拟机：就其自身内核而言读取是物理的；其下的宿主机可能另有缓存。",
    ),
)
"""Of the same: what a reader might not see."""

_GATES = (
    Text("there is no sample", "没有样本"),
    Text("the measurement is INVALID, for the reasons given", "测量无效，原因见所列"),
    Text("{have} rounds have a TTFT, {wanted} are needed", "只有 {have} 轮有 TTFT，需要 {wanted} 轮"),
    Text("not readable", "无法读取"),
    Text("no disk is known under it", "其下没有已知的磁盘"),
    Text("stopped: {count} wrong bytes came back from {path}", "已终止：从 {path} 读回 {count} 个错误字节"),
    Text("stopped: {said}", "已终止：{said}"),
    Text("stopped after round {round}: {said}", "第 {round} 轮之后终止：{said}"),
    Text("stopped after {time} of load: {said}", "加载 {time} 之后终止：{said}"),
    Text("stopped after {time} of load: {cause}", "加载 {time} 之后终止：{cause}"),
    Text("rounds of {group} at {step} at once differ by {drift}", "{group} 在并发 {step} 的各轮相差 {drift}"),
    Text("a request of {group} failed in round {round}: {error}", "{group} 的一个请求在第 {round} 轮失败：{error}"),
    Text(
        "session {session} had another output with {group} in round {round}",
        "会话 {session} 在第 {round} 轮由 {group} 给出了不同的输出",
    ),
    Text(
        "not run: {gate} ended as {outcome}, and the plan says to stop then",
        "没有运行：{gate} 的结果是 {outcome}，而计划规定此时停止",
    ),
    Text("it could not measure: {error}", "无法测量：{error}"),
    Text("the fault did not reach the product: nothing is known of it", "故障没有作用到产品：对它一无所知"),
    Text("{count} loads in the first window, {enough} are needed", "首段有 {count} 次加载，需要 {enough} 次"),
    Text("{count} loads in the last window, {enough} are needed", "末段有 {count} 次加载，需要 {enough} 次"),
    Text(
        "worker {worker} was killed and does not end: it waits for a device",
        "工作进程 {worker} 已被杀死却没有结束：它在等待设备",
    ),
    Text("worker {worker} ended with {code}", "工作进程 {worker} 以 {code} 结束"),
    Text("no rest within {limit} s: {count} loads are open", "{limit} 秒内没有静止：仍有 {count} 次加载未完"),
    Text(
        "{loads} loads, {disk} from disk, {wrong} wrong bytes, {faults} faults",
        "{loads} 次加载，其中 {disk} 次来自磁盘，{wrong} 个错误字节，{faults} 次故障",
    ),
    Text("interrupted and gone on with {count} times", "中断并继续了 {count} 次"),
    Text("stood still for {time}, which are not counted as time of load", "停顿了 {time}，不计入加载时间"),
    Text("errors: {kinds}", "错误：{kinds}"),
)
"""Of `forebay.bench.gates`."""

_OF_A_GROUP = Text("{group}: {said}", "{group}：{said}")
SAYINGS = (*_READS, *_AUDIT, *_NOTES, *_GATES, _OF_A_GROUP)
"""The first that fits is taken."""
_PLACE = re.compile(r"\{(\w+)\}")


def in_chinese(sentence: str) -> str | None:
    """None where no pattern fits."""
    for pattern, saying in _patterns():
        if found := pattern.fullmatch(sentence):
            values = found.groupdict()
            if "said" in values:
                within = in_chinese(values["said"])
                if within is None:
                    continue
                values["said"] = within
            return saying.zh.format(**values)
    return None


def said(voice: Voice, sentence: str) -> str:
    """A sentence of a record, as markup in the page's language where it can be."""
    translated = None if voice.language is Language.ENGLISH else in_chinese(sentence)
    return f'<span lang="en">{escaped(sentence)}</span>' if translated is None else escaped(translated)


def said_items(voice: Voice, sentences: Iterable[str]) -> str:
    """The same as a list; nothing without any."""
    found = "".join(f"<li>{said(voice, sentence)}</li>" for sentence in sentences)
    return f"<ul>{found}</ul>" if found else ""


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Text], ...]:
    return tuple((re.compile(_pattern(saying.en), re.DOTALL), saying) for saying in SAYINGS)


def _pattern(template: str) -> str:
    """`{x}` is anything, and as little as will do. At the beginning it has no colon: one comes after a group's name."""
    words, *rest = _PLACE.split(template)
    found = re.escape(words)
    for name, after in zip(rest[::2], rest[1::2], strict=True):
        anything = "." if found or name == "said" else "[^:]"
        found += f"(?P<{name}>{anything}+?){re.escape(after)}"
    return found
